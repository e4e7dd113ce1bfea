"""Chat templates, rendered as transformers renders them, within limits.

A template is a program that comes with a checkpoint. jinja2's sandbox keeps it from Python's
internals, but not from long runs and very long texts. So all that repeats or joins is checked
(`template_limits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cetane.checkpoint.template_filters import (
    format_plain,
    join,
    replace,
    sliced,
    within_limits,
)
from cetane.checkpoint.template_limits import (
    bits,
    check_bits,
    check_comparisons,
    check_size,
    check_time,
    checked,
    checked_short,
    counted,
    rendering,
    size_of,
    timed_items,
)
from cetane.errors import CetaneError
from cetane.validation import spoken

LARGEST_TEMPLATE = 1 << 17
"""Characters. The longest template of a released model has 30,000."""
MOST_NAMES = 512
"""The most names in a template. Jinja copies all of them for each condition when it compiles."""
PLAIN_TEXT = "ask in plain text, or mend the model's chat template and port the model again"
"""The advice for a template that does not work."""
OWNERS = (str, dict, list, tuple)
"""Python's own types whose methods a template may call."""
REFUSED = {
    "center", "encode", "expandtabs", "format", "format_map", "ljust", "rjust", "striptags",
    "translate", "zfill",
}  # fmt: skip
"""Methods of texts that make a text of any length, make bytes, or take long."""
COMPARING = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
"""Methods of texts that may compare each character with each of their argument. Python's searches
from the left take linear time."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message may hold its reasoning. The first of them counts."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: dict[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt for `messages`, and for `tools` that the model may call.

    Raises CetaneError if the template is broken, refuses the messages, or takes more time or memory
    than any template needs.
    """
    if len(template) > LARGEST_TEMPLATE:
        raise CetaneError(
            f"the chat template has {len(template):,} characters, more than {LARGEST_TEMPLATE:,}",
            PLAIN_TEXT,
        )
    try:
        with rendering():
            pieces = _compile(template).generate(
                messages=[_as_transformers_hands_it(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
            return join(pieces)
    except Exception as error:  # a template is foreign code, which can fail in any way
        reason = " ".join(spoken(error).split()) or type(error).__name__
        raise CetaneError(
            f"the chat template does not accept these messages: {reason}", PLAIN_TEXT
        ) from error


def _as_transformers_hands_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that hold None, and with its reasoning under each name that
    templates read.

    Source: transformers 5, `_normalize_chat_messages` and `_alias_reasoning_fields`.
    """
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limits(NodeTransformer):
    """Puts a filter around every node that repeats, makes a text or a list, and checks the numbers
    that the template writes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "timed_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "checked")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "checked") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "checked")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return nodes.Filter(node.node, "sliced", ends, [], None, None)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        check_bits(bits(node.value))
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _names(tree: nodes.Template) -> set[str]:
    """The names of a template's variables and macros. Raises TemplateError if it imports more."""
    if any(tree.find_all((nodes.Import, nodes.FromImport))):
        raise TemplateError("a template may not import others")
    found = {node.name for node in tree.find_all(nodes.Name)}
    return found | {node.name for node in tree.find_all(nodes.Macro)}


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox with limits: loops and calls check the time, results check their length."""

    intercepted_binops = frozenset({"*", "**", "+", "-", "//", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limits().visit(super()._parse(source, name, filename))
        if len(_names(tree)) > MOST_NAMES:
            raise TemplateError(f"it has more than {MOST_NAMES} names")
        return tree

    def wrap_str_format(self, value: Any) -> Any:
        """Leave `str.format` as it is, so that `call` sees it. Jinja's sandbox would allow all of
        it, and a width of a billion makes a billion spaces."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_time()
        if operator == "+":
            check_size(size_of(left) + size_of(right))
        elif operator == "-" and isinstance(left, Set):  # one call, however many keys
            raise TemplateError("a template may not subtract keys")
        elif operator == "%" and isinstance(left, str):
            raise TemplateError("a template may not format with %")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    check_size(size_of(value) * max(times, 0))
        power = operator == "**"
        check_bits(bits(left) * abs(right) if power else bits(left) + bits(right))
        return counted(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_time()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(obj, BuiltinMethodType) and not isinstance(owner, OWNERS):
            raise TemplateError(f"a template may not call {name}() of {type(owner).__name__}")
        if isinstance(owner, str):
            if name == "format" and type(owner) is str:  # a marked text would escape the values
                return format_plain(owner, *args, **kwargs)
            if name in REFUSED:
                raise TemplateError(f"a template may not call {name}()")
            if name == "replace":
                return replace(owner, *args)
            if name == "join":
                return join(timed_items(args[0]), owner)
            if name in COMPARING:
                check_comparisons(owner, *args, *kwargs.values())
        if obj is dict or obj is Namespace:  # many keys of one hash take quadratic time
            args = tuple(
                timed_items(a) if isinstance(a, list | tuple | Iterator) else a for a in args
            )
        return counted(checked(super().call(context, obj, *args, **kwargs)))


@lru_cache
def _compile(template: str) -> Template:
    # Templates come with the checkpoint and are not trusted, so they run in the sandbox.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # folding constants takes cubic time in the depth of an expression
    )
    environment.concat = join  # type: ignore[method-assign]
    environment.filters = within_limits(environment.filters) | {
        "timed_items": timed_items,
        "joined": join,
        "checked": checked,
        "sliced": sliced,
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum", None)
    try:
        return environment.from_string(template)
    except (RecursionError, MemoryError) as error:  # of jinja2's parser, or of Python's
        raise TemplateError("it is too deeply nested, or an if has too many branches") from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(checked_short("the format of a date", form))
