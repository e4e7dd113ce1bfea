"""Calls of tools in the text of models, in the forms of their templates."""

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.server.grammar import Grammars
from cetane.server.requests import ChatRequest
from cetane.server.tools import forced_grammar, may_be_call, parse_calls, strict_grammar

NAMES = ["weather", "time"]
CALL = '{"name": "weather", "arguments": {"place": "Oslo"}}'
FORMS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes, cut at its end": f"<tool_call>\n{CALL}",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "mistral, marker skipped": f"[{CALL}]",
    "llama": '{"name": "weather", "parameters": {"place": "Oslo"}}',
    "llama, marked": '<|python_tag|>{"name": "weather", "parameters": {"place": "Oslo"}}',
    "generic": CALL,
    "fenced": f"```json\n{CALL}\n```",
    "arguments as text": '{"name": "weather", "arguments": "{\\"place\\": \\"Oslo\\"}"}',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call(name: str) -> None:
    text, (call,) = parse_calls(FORMS[name], NAMES)
    assert text == "" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "Oslo"}
    assert all(may_be_call(FORMS[name][:length]) for length in range(len(FORMS[name])))


def test_several_calls_and_text_before() -> None:
    other = '{"name": "time", "arguments": {}}'
    text, calls = parse_calls(
        f"Let me see. <tool_call>{CALL}</tool_call><tool_call>{other}</tool_call>", NAMES
    )
    assert text == "Let me see." and [c.function.name for c in calls] == NAMES
    assert len({call.id for call in calls}) == 2
    assert parse_calls(f"Now: <tool_call>{CALL}</tool_call> and more", NAMES)[0] == "Now:  and more"
    _, calls = parse_calls(f"{CALL}; {other}", NAMES)
    assert [c.function.name for c in calls] == NAMES


@pytest.mark.parametrize("place", ["</tool_call>", "<tool_call>{}</tool_call>", '"</tool_call>"'])
def test_an_argument_may_hold_the_marks(place: str, tokenizer: Tokenizer) -> None:
    call = json.dumps({"name": "weather", "arguments": {"place": place}})
    written = f"<tool_call>\n{call}\n</tool_call>"
    tool = {"name": "weather", "parameters": PLACES | {"properties": {"place": {"enum": [place]}}}}
    forced = forced_grammar(request(tool, tool_choice="required"), "<tool_call>")
    assert allows(forced or "", tokenizer, written)
    text, calls = parse_calls(f"Both: {written} {written}", NAMES)
    assert text == "Both:"
    assert [json.loads(one.function.arguments) for one in calls] == [{"place": place}] * 2
    assert parse_calls(call, NAMES)[1][0].function.name == "weather"


@pytest.mark.parametrize(
    "text",
    ["Hello", '{"a": 1}', '{"name": "other", "arguments": {}}', "<tool_call>oops</tool_call>",
     '{"name": "weather", "arguments": {"x": NaN}}', '{"name": "time", "arguments": {"x": 1e999}}',
     '{"name": "weather", "arguments": [1]}', '{"name": "weather", "arguments": "x"}', "[" * 9000,
     f"{CALL} and more", f"<tool_call>{CALL}</tool_call><tool_call>oops</tool_call> and more",
     f"<tool_call>{CALL}</tool_call>" + '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "we'],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_calls(text, NAMES) == (text, [])


def test_a_fence_before_many_blanks_takes_no_time() -> None:
    """Small models write blanks without end. The time was their number cubed: 9 s for 1,600, in
    which the server answered nobody."""
    text = "```json\n" + " " * 3_000 + "x"
    started = time.process_time()
    assert parse_calls(text, NAMES) == (text, [])
    assert time.process_time() - started < 1


def test_plain_text_need_not_wait() -> None:
    assert not may_be_call("Hello <b") and may_be_call(" <tool_") and may_be_call("")


PLACES: dict[str, Any] = {
    "type": "object", "properties": {"place": {"enum": ["Oslo", "Rome"]}}, "required": ["place"],
    "additionalProperties": False,
}  # fmt: skip


def request(*tools: dict[str, Any], **options: Any) -> ChatRequest:
    """A request with tools, each `{name: ..., strict: ...}`."""
    functions = [{"type": "function", "function": {"parameters": PLACES} | one} for one in tools]
    message = {"role": "user", "content": "Where?"}
    content = {"model": "m", "messages": [message], "tools": functions}
    return ChatRequest.model_validate(content | options)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_checkpoint_folder).tokenizer


def allows(grammar: str, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text with an end follows a grammar, token by token."""
    constraint = Grammars(tokenizer, tokenizer.vocab_size).constraint(grammar, "tools")
    for token in (*tokenizer.encode_plain(text), next(iter(tokenizer.eos_ids))):
        if not constraint.allowed()[token]:
            return False
        constraint.keep(token)
    return True


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("It is cold in {Oslo}.", True),
        (f"Let me see. <tool_call>\n{CALL}\n</tool_call>", True),
        (f"<tool_call>\n{CALL}\n</tool_call> and <tool_call>\n{CALL}\n</tool_call>", True),
        ('<tool_call>\n{"name": "time", "arguments": {"any": 1}}\n</tool_call>', True),
        (f"<tool_call>\n{CALL.replace('Oslo', 'Bonn')}\n</tool_call>", False),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        (f"<tool_call>\n{CALL}", False),
    ],
)
def test_a_strict_tool_is_called_by_its_schema(
    text: str, allowed: bool, tokenizer: Tokenizer
) -> None:
    """Whatever stands around the call. A tool that is not strict takes any arguments."""
    asked = request({"name": "weather", "strict": True}, {"name": "time"})
    grammar = strict_grammar(asked, "... <tool_call> ...")
    assert grammar is not None
    assert allows(grammar, tokenizer, text) is allowed


DAY = {"$defs": {"day": {"enum": [1, 2]}}, "type": "object", "additionalProperties": False,
       "properties": {"day": {"$ref": "#/$defs/day"}, "next": {"$ref": "#"}},
       "required": ["day"]}  # fmt: skip
CITY = DAY | {"$defs": {"day": {"enum": ["Monday"]}}}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("weather", {"day": 1}),
        ("weather", {"day": 1, "next": {"day": 2}}),
        ("time", {"day": "Monday", "next": {"day": "Monday"}}),
        ("weather", {"day": "Monday"}),
        ("time", {"day": 1}),
        ("weather", {"day": 1, "next": {"name": "weather", "arguments": {"day": 1}}}),
    ],
)
@pytest.mark.parametrize("marked", [True, False])
def test_references_of_a_tool_are_to_its_own_schema(
    name: str, arguments: dict[str, Any], marked: bool, tokenizer: Tokenizer
) -> None:
    """Pydantic writes `$defs` and `$ref`. A call is a larger schema around that of its tool."""
    tools = {"weather": DAY, "time": CITY}
    asked = [{"name": tool, "parameters": tools[tool], "strict": True} for tool in tools]
    call = json.dumps({"name": name, "arguments": arguments})
    if marked:
        grammar = strict_grammar(request(*asked), "<tool_call>")
        call = f"<tool_call>\n{call}\n</tool_call>"
    else:
        grammar = forced_grammar(request(*asked, tool_choice="required"), "a template")
    valid = jsonschema.Draft202012Validator(tools[name]).is_valid(arguments)
    assert allows(grammar or "", tokenizer, call) is valid


@pytest.mark.parametrize(
    "parameters",
    [{}, {"properties": {"place": {"enum": ["Oslo"]}}}, {"type": ["object", "null"]},
     {"$ref": "#/$defs/any", "$defs": {"any": {}}}],
)  # fmt: skip
@pytest.mark.parametrize("arguments", ["3", '"x"', "[]", "null", "{}", '{"place": "Oslo"}'])
def test_arguments_are_an_object(
    parameters: dict[str, Any], arguments: str, tokenizer: Tokenizer
) -> None:
    """Whatever the grammar allows is a call, even if the tool's schema names no type."""
    asked = request({"name": "weather", "parameters": parameters}, tool_choice="required")
    call = f'{{"name": "weather", "arguments": {arguments}}}'
    allowed = allows(forced_grammar(asked, "a template") or "", tokenizer, call)
    assert allowed is bool(parse_calls(call, NAMES)[1]) is arguments.startswith("{")


SHARE = {"type": "object", "properties": {"share": {"type": "number", "exclusiveMinimum": 0,
         "maximum": 0.5}}, "required": ["share"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("marked", [True, False])
def test_an_exclusive_bound_of_a_tool(marked: bool, tokenizer: Tokenizer) -> None:
    asked = {"name": "mix", "parameters": SHARE, "strict": True}
    for share, valid in ((0, False), (0.25, True)):
        call = json.dumps({"name": "mix", "arguments": {"share": share}})
        if marked:
            grammar = strict_grammar(request(asked), "<tool_call>")
            call = f"<tool_call>\n{call}\n</tool_call>"
        else:
            grammar = forced_grammar(request(asked, tool_choice="required"), "a template")
        assert allows(grammar or "", tokenizer, call) is valid


def test_where_strict_has_no_effect() -> None:
    strict = {"name": "weather", "strict": True}
    assert strict_grammar(request({"name": "weather"}), "<tool_call>") is None
    assert strict_grammar(request(strict, tool_choice="none"), "<tool_call>") is None
    assert strict_grammar(request(strict), "a template without marks") is None
