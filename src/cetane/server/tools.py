"""Calls of tools: their forms in the text of a model, and in OpenAI's API.

A model writes calls as its chat template shows it. Three forms cover the templates that are common:

- Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`;
- Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`;
- Llama 3 and others: an object or a list of objects as the whole text, with `parameters` or
  `arguments`.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, StructTag

from cetane.server.answers import CalledFunction, MadeCall
from cetane.server.requests import ChatRequest, Tool
from cetane.server.schemas import COMPACT, lark_json, mended

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LEADING = ("[TOOL_CALLS]", "<|python_tag|>")
"""Markers before calls that take the rest of the text."""
FENCE = "```"
BETWEEN = re.compile(r"\s*;?\s*")
"""What may stand between two values."""
STARTS = (OPEN, *LEADING, "{", "[", FENCE)
"""The ways in which a text that is a call begins."""


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for a chat template, as OpenAI's API writes them."""
    return [tool.model_dump(exclude={"function": {"strict"}}) for tool in tools]


def parse_calls(text: str, names: Sequence[str]) -> tuple[str, list[MadeCall]]:
    """The text around the calls, and the calls. If one of them is no call of a known tool, the
    whole counts as text."""
    around, calls = marked_calls(text, names)
    if calls:
        return around.rstrip(), calls
    whole = text.strip()
    for marker in LEADING:
        whole = whole.removeprefix(marker).strip()
    values, rest = leading_values(unfenced(whole))
    calls = [] if rest else made_calls(values, names)
    return ("", calls) if calls else (text, [])


def unfenced(text: str) -> str:
    """The content of a text that is one fenced block; any other text as it is."""
    inner = text.removeprefix(FENCE)
    if inner == text or not inner.endswith(FENCE):
        return text
    return inner.removesuffix(FENCE).removeprefix("json").strip()


def marked_calls(text: str, names: Sequence[str]) -> tuple[str, list[MadeCall]]:
    """The text around calls between marks, and the calls; none if marks hold anything else.

    A call ends where its JSON ends, not at the next mark: texts in its arguments may hold marks.
    """
    around, mark, rest = text.partition(OPEN)
    calls: list[MadeCall] = []
    while mark:
        values, rest = leading_values(rest)
        made = made_calls(values, names)
        if not made or (rest and not rest.startswith(CLOSE)):
            return text, []
        calls += made
        between, mark, rest = rest.removeprefix(CLOSE).partition(OPEN)
        around += between
    return around, calls


def leading_values(text: str) -> tuple[list[Any], str]:
    """The JSON values that a text begins with, and the rest. Values of a list count one by one, and
    semicolons may stand between values."""
    decoder, values = json.JSONDecoder(), []
    at = len(text) - len(text.lstrip())
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        values += value if isinstance(value, list) else [value]
        between = BETWEEN.match(text, end)
        assert between is not None  # it may be empty
        at = between.end()
    return values, text[at:]


def made_calls(values: Sequence[Any], names: Sequence[str]) -> list[MadeCall]:
    """Values as calls; none if one of them is no call."""
    calls = [one_call(value, names) for value in values]
    return [call for call in calls if call is not None] if all(calls) else []


def one_call(value: Any, names: Sequence[str]) -> MadeCall | None:
    """An object as a call; None if it is none, or names no tool of the request."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a text of JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, allow_nan=False)
    except ValueError:  # a number beyond float64, or NaN, which JSON cannot hold
        return None
    function = CalledFunction(name=value["name"], arguments=text)
    # Templates of Mistral refuse every id but nine letters or digits.
    return MadeCall(id=secrets.token_hex(5)[:9], function=function)


def forced_grammar(request: ChatRequest, template: str) -> str | None:
    """The grammar of a call that the request forces, in the template's form; None without one."""
    if not request.forces_call:
        return None
    arguments = "parameters" if '"parameters": ' in template and OPEN not in template else None
    schemas = [call_schema(tool, arguments or "arguments") for tool in request.callable_tools]
    term = lark_json(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    start = f'"{OPEN}\\n" call "\\n{CLOSE}"' if OPEN in template else "call"
    return str(LLMatcher.grammar_from_lark(f"start: {start}\ncall: {term}"))


def strict_grammar(request: ChatRequest, template: str) -> str | None:
    """The grammar of text whose calls of `strict` tools follow their schemas; None without such
    tools, and for a template that marks no calls: there any text may begin one."""
    strict = any(tool.function.strict for tool in request.tools)
    if not strict or request.tool_choice == "none" or OPEN not in template:
        return None
    schemas = [call_schema(tool if tool.function.strict else loose(tool), "arguments")
               for tool in request.tools]  # fmt: skip
    call = StructTag(
        trigger=OPEN, begin=f"{OPEN}\n", end=f"\n{CLOSE}",
        grammar={"anyOf": schemas, "x-guidance": COMPACT},
    )  # fmt: skip
    return StructTag.to_grammar([call], assume_special=False)


def loose(tool: Tool) -> Tool:
    """A tool that takes any arguments."""
    function = tool.function.model_copy(update={"parameters": {"type": "object"}})
    return tool.model_copy(update={"function": function})


def call_schema(tool: Tool, arguments: str) -> Mapping[str, Any]:
    """The JSON schema of a call of a tool. The parameters have an `$id` of their own, so that their
    references are to themselves, such as `#/$defs/place`.

    Arguments are always an object, also where the tool's schema does not say so.
    """
    name = tool.function.name
    parameters = mended(tool.function.parameters) | {"type": "object", "$id": f"tool:{name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def may_be_call(text: str) -> bool:
    """Whether a text so far may become a call, so that a stream must wait."""
    start = text.lstrip()
    return any(start.startswith(s) or s.startswith(start) for s in STARTS) or OPEN in text
