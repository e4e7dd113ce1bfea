"""Chat templates, rendered as transformers renders them, within limits.

A template is a program that comes with a checkpoint. jinja2's sandbox keeps it from Python's
internals, but not from long runs and very long texts. So this module counts all that repeats or
joins.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from string import Formatter
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_round, do_trim, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cetane.errors import CetaneError

LARGEST_TEMPLATE = 1 << 17
"""Characters. The longest template of a released model has 30,000."""
MOST_NAMES = 512
"""The most names in a template. Jinja copies all of them for each condition when it compiles."""
SECONDS = 5.0
"""The most seconds that a template may run."""
LARGEST = 1 << 22
"""The most characters or items of a text or list that a template makes."""
MOST_BITS = 4096
"""The most bits of a whole number that a template computes."""
MOST_COMPARISONS = 10**8
"""The most pairs of characters that one call compares: 0.1 s. Nothing stops a call of C code."""
MOST_SHORT = 128
"""The most characters of a date's format, and of what stands between items of JSON."""
_ITEM = 32
"""The size of a list item, in characters."""
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
UNBOUNDED = (
    "batch", "center", "filesizeformat", "format", "pprint", "slice", "striptags", "urlize",
    "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that do the same, or that no chat template needs."""
ITERATING = {
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort",
    "sum", "unique",
}  # fmt: skip
"""Filters that take the items of what they are given one by one."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message may hold its reasoning. The first of them counts."""

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


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
            f"the chat template has {len(template):,} characters, more than {LARGEST_TEMPLATE:,}"
        )
    before = _deadline.set(time.monotonic() + SECONDS)
    try:
        pieces = _compile(template).generate(
            messages=[_as_transformers_hands_it(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
        return _join(pieces)
    except Exception as error:  # a template is foreign code, which can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CetaneError(f"the chat template does not accept these messages: {reason}") from error
    finally:
        _deadline.reset(before)


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
    """Puts a filter around every node that repeats, joins texts, or makes a list, and checks the
    numbers that the template writes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "sized")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "sized") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "sized")

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        _check_bits(_bits(node.value))
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
        _tick()
        if operator == "+":
            _check(_size(left) + _size(right))
        elif operator == "-" and isinstance(left, Set):  # one call, however many keys
            raise TemplateError("a template may not subtract keys")
        elif operator == "%" and isinstance(left, str):
            raise TemplateError("a template may not format with %")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check(_size(value) * max(times, 0))
        power = operator == "**"
        _check_bits(_bits(left) * abs(right) if power else _bits(left) + _bits(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(obj, BuiltinMethodType) and not isinstance(owner, OWNERS):
            raise TemplateError(f"a template may not call {name}() of {type(owner).__name__}")
        if isinstance(owner, str):
            if name == "format" and type(owner) is str:  # a marked text would escape the values
                return _format(owner, *args, **kwargs)
            if name in REFUSED:
                raise TemplateError(f"a template may not call {name}()")
            if name == "replace":
                return _replace(owner, *args)
            if name == "join":
                return _join(_counted(args[0]), owner)
            if name in COMPARING:
                _check_comparisons(owner, *args, *kwargs.values())
        if obj is dict or obj is Namespace:  # many keys of one hash take quadratic time
            args = tuple(_counted(a) if isinstance(a, list | tuple | Iterator) else a for a in args)
        return _sized(super().call(context, obj, *args, **kwargs))


def _bits(value: Any) -> int:
    """The bits of a whole number; 1 for anything else."""
    return value.bit_length() if isinstance(value, int) else 1


def _check_bits(bits: float) -> None:
    if bits > MOST_BITS:
        raise TemplateError("it computes a number that is too large")


def _tick() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateError(f"it runs for more than {SECONDS:g} s")


def _check(size: int) -> None:
    if size > LARGEST:
        raise TemplateError(f"it makes more than {LARGEST:,} characters")


def _check_comparisons(text: str, *wanted: Any) -> None:
    longest = max((len(value) for value in wanted if isinstance(value, str)), default=0)
    if len(text) * longest > MOST_COMPARISONS:
        raise TemplateError(f"it looks for {longest:,} characters in {len(text):,}")


def _size(value: Any) -> int:
    """The size of a text, list or dict, or of a dict's keys or items, in characters. A shared list
    counts each time it occurs."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, dict | list | tuple | Set):
            size += _ITEM * len(item)
        _check(size)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple | Set):
            waiting += item
    return size


def _sized(value: Any) -> Any:
    _size(value)
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop. Raises TemplateError when the time is up."""
    for number, value in enumerate(values):
        _tick()
        _check(number)
        yield value


def _measured(values: Iterable[Any]) -> Iterator[Any]:
    """The items that a filter takes or gives, and may keep. Raises TemplateError when the time is
    up, or all of them are too large together."""
    size = 0
    for value in values:
        _tick()
        size += _ITEM + _size(value)
        _check(size)
        yield value


def _limited(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """One of Jinja's filters, which measures the items that it takes, and what it makes."""
    first = int(hasattr(plain, "jinja_pass_arg"))  # before it comes what Jinja itself passes

    @wraps(plain)
    def limited(*values: Any, **options: Any) -> Any:
        _tick()
        arguments = [*values]
        if name in ITERATING and isinstance(arguments[first], Iterable):
            arguments[first] = _measured(arguments[first])
        made = plain(*arguments, **options)
        return _measured(made) if isinstance(made, Iterator) else _bounded(made)

    return limited


def _bounded(value: Any) -> Any:
    """`value`, measured if it is a text or a number: lists come from measured items, or were there
    before."""
    _check_bits(_bits(value))
    return _sized(value) if isinstance(value, str) else value


def _join(values: Iterable[Any], between: Any = "") -> str:
    pieces, size = [], 0
    for value in values:
        _size(value)
        pieces.append(str(value))
        size += len(pieces[-1]) + len(between)
        _check(size)
    return str(between).join(pieces)


@pass_environment
def _join_filter(
    environment: Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    """Jinja's `join`."""
    items = _counted(values)
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    return _join(items, d)


def _format(text: str, *values: Any, **named: Any) -> str:
    """Python's `format`, for plain fields alone, such as `{}`, `{0}` and `{name}`. Others reach
    into values, or make a text of any width."""
    fields = [field for field in Formatter().parse(text) if field[1] is not None]
    for _, name, form, conversion in fields:
        if form or conversion or not re.fullmatch(r"\w*", name or ""):
            raise TemplateError("a template may format only plain fields, such as {} and {0}")
    longest = max((len(_join([value])) for value in (*values, *named.values())), default=0)
    _check(len(text) + len(fields) * longest)
    return text.format(*values, **named)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's `replace` filter, and the method of texts."""
    text, new = str(text), str(new)
    _check(len(text) + text.count(str(old)) * len(new))
    return text.replace(str(old), new, -1 if count is None else count)


def _trim(value: Any, chars: str | None = None) -> str:
    """Jinja's `trim`."""
    _check_comparisons(str(value), chars)
    return do_trim(value, chars)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`. It adds a line end first, which keeps one that the text ends with."""
    lines = (str(text) + "\n").splitlines()
    _check(len(lines) * _length(width))
    prefix = width if isinstance(width, str) else " " * width
    indented = [prefix + line if line or blank else line for line in lines[1:]]
    return "\n".join([(prefix if first else "") + lines[0], *indented])


def _length(spaces: int | str) -> int:
    """The length of a text, or of spaces that a number stands for."""
    return len(spaces) if isinstance(spaces, str) else spaces


def _short(what: str, value: Any) -> Any:
    """A text or a number of spaces that is short enough. Raises TemplateError for another."""
    if _length(value) > MOST_SHORT:
        raise TemplateError(f"{what} is longer than {MOST_SHORT} characters")
    return value


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's `round`."""
    return do_round(value, max(-64, min(precision, 64)), method)


@lru_cache
def _compile(template: str) -> Template:
    # Templates come with the checkpoint and are not trusted, so they run in the sandbox.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # folding constants takes cubic time in the depth of an expression
    )
    environment.concat = _join  # type: ignore[method-assign]
    environment.filters = {
        name: _limited(name, plain)
        for name, plain in environment.filters.items()
        if name not in UNBOUNDED
    } | {
        "tojson": _tojson,
        "join": _join_filter,
        "replace": _replace,
        "trim": _trim,
        "indent": _indent,
        "round": _round,
        "counted": _counted,
        "joined": _join,
        "sized": _sized,
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum", None)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(_short("the format of a date", form))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    _size(value)
    for part in separators or ():  # the encoder keeps a copy for each level
        _short("a separator of JSON", part)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent and _short("the indent of JSON", indent),
        separators=separators,
        sort_keys=sort_keys,
    )
    return _join(encoder.iterencode(value))
