"""The filters of chat templates: Jinja's, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import Environment, TemplateError, pass_environment
from jinja2.filters import do_round, do_trim, make_attrgetter

from cetane.checkpoint.template_limits import (
    check_comparisons,
    check_size,
    check_time,
    checked,
    checked_scalar,
    checked_short,
    counted,
    length,
    sized_items,
    timed_items,
)

UNBOUNDED = (
    "batch", "center", "filesizeformat", "format", "pprint", "slice", "striptags", "urlize",
    "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that make a text of any length, or take long, or that no chat template needs."""
ITERATING = {
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort",
    "sum", "unique",
}  # fmt: skip
"""Filters that take the items of what they are given one by one."""


def within_limits(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters for templates: limited, written anew, or left out."""
    limited = {
        name: limited_filter(name, plain)
        for name, plain in filters.items()
        if name not in UNBOUNDED
    }
    return limited | {
        "tojson": _tojson,
        "join": join_filter,
        "replace": replace,
        "trim": _trim,
        "indent": _indent,
        "round": _round,
    }


def limited_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """One of Jinja's filters, which checks the items that it takes, and what it makes."""
    first = int(hasattr(plain, "jinja_pass_arg"))  # before it comes what Jinja itself passes

    @wraps(plain)
    def limited(*values: Any, **options: Any) -> Any:
        check_time()
        arguments = [*values]
        if name in ITERATING and isinstance(arguments[first], Iterable):
            arguments[first] = sized_items(arguments[first])
        made = plain(*arguments, **options)
        return sized_items(made) if isinstance(made, Iterator) else counted(checked_scalar(made))

    return limited


def join(values: Iterable[Any], between: Any = "") -> str:
    pieces, size = [], 0
    for value in values:
        checked(value)
        pieces.append(str(value))
        size += len(pieces[-1]) + len(between)
        check_size(size)
    return counted(str(between).join(pieces))


@pass_environment
def join_filter(
    environment: Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    """Jinja's `join`."""
    items = timed_items(values)
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    return join(items, d)


def format_plain(text: str, *values: Any, **named: Any) -> str:
    """Python's `format`, for plain fields alone, such as `{}`, `{0}` and `{name}`. Others reach
    into values, or make a text of any width."""
    fields = [field for field in Formatter().parse(text) if field[1] is not None]
    for _, name, form, conversion in fields:
        if form or conversion or not re.fullmatch(r"\w*", name or ""):
            raise TemplateError("a template may format only plain fields, such as {} and {0}")
    longest = max((len(join([value])) for value in (*values, *named.values())), default=0)
    check_size(len(text) + len(fields) * longest)
    return counted(text.format(*values, **named))


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's `replace` filter, and the method of texts."""
    text, new = str(text), str(new)
    check_size(len(text) + text.count(str(old)) * len(new))
    return counted(text.replace(str(old), new, -1 if count is None else count))


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """A slice, as Jinja takes it of any value."""
    return counted(value[start:stop:step])


def _trim(value: Any, chars: str | None = None) -> str:
    """Jinja's `trim`."""
    check_comparisons(str(value), chars)
    return counted(do_trim(value, chars))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`. It adds a line end first, which keeps one that the text ends with."""
    lines = (str(text) + "\n").splitlines()
    check_size(len(lines) * length(width))
    prefix = width if isinstance(width, str) else " " * width
    indented = [prefix + line if line or blank else line for line in lines[1:]]
    return join([(prefix if first else "") + lines[0], *indented], "\n")


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's `round`."""
    return do_round(value, max(-64, min(precision, 64)), method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    checked(value)
    for part in separators or ():  # the encoder keeps a copy for each level
        checked_short("a separator of JSON", part)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent and checked_short("the indent of JSON", indent),
        separators=separators,
        sort_keys=sort_keys,
    )
    return join(encoder.iterencode(value))
