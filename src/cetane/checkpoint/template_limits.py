"""The limits of chat templates: time, sizes and numbers. All checks raise TemplateError."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

SECONDS = 5.0
"""The most seconds that a template may run."""
LARGEST = 1 << 22
"""The most characters or items of a text or list that a template makes."""
MOST_TEXT = 1 << 27
"""The most characters of all texts together that a rendering makes. It may keep each in a variable,
so they bound its memory: at four bytes a character, 0.5 GB. A text counts each time it is made."""
MOST_BITS = 4096
"""The most bits of a whole number that a template computes."""
MOST_COMPARISONS = 10**8
"""The most pairs of characters that one call compares: 0.1 s. Nothing stops a call of C code."""
MOST_SHORT = 128
"""The most characters of a date's format, and of what stands between items of JSON."""
_ITEM = 32
"""The size of a list item, in characters."""

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))
_left: ContextVar[int] = ContextVar("left", default=MOST_TEXT)
"""The characters that may still be made."""


@contextmanager
def rendering() -> Iterator[None]:
    """Templates that run inside have `SECONDS`, and make `MOST_TEXT` characters."""
    before, left = _deadline.set(time.monotonic() + SECONDS), _left.set(MOST_TEXT)
    try:
        yield
    finally:
        _deadline.reset(before)
        _left.reset(left)


def counted(value: Any) -> Any:
    """`value`. A text counts among those that this rendering makes."""
    if isinstance(value, str):
        _left.set(_left.get() - len(value))
        if _left.get() < 0:
            raise TemplateError(f"all texts that it makes have more than {MOST_TEXT:,} characters")
    return value


def check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateError(f"it runs for more than {SECONDS:g} s")


def check_size(size: int) -> None:
    if size > LARGEST:
        raise TemplateError(f"it makes more than {LARGEST:,} characters")


def size_of(value: Any) -> int:
    """The size of a text, list or dict, or of a dict's keys or items, in characters. A shared list
    counts each time it occurs."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, dict | list | tuple | Set):
            size += _ITEM * len(item)
        check_size(size)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple | Set):
            waiting += item
    return size


def checked(value: Any) -> Any:
    """`value`, if it is not too large."""
    size_of(value)
    return value


def bits(value: Any) -> int:
    """The bits of a whole number; 1 for anything else."""
    return value.bit_length() if isinstance(value, int) else 1


def check_bits(bits: float) -> None:
    if bits > MOST_BITS:
        raise TemplateError("it computes a number that is too large")


def checked_scalar(value: Any) -> Any:
    """`value`, if it is no text or number that is too large. Lists come from sized items, or were
    there before."""
    check_bits(bits(value))
    return checked(value) if isinstance(value, str) else value


def timed_items(values: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, while there is time."""
    for number, value in enumerate(values):
        check_time()
        check_size(number)
        yield value


def sized_items(values: Iterable[Any]) -> Iterator[Any]:
    """The items that a filter takes or gives, and may keep, while there is time, and while all of
    them are not too large together."""
    size = 0
    for value in values:
        check_time()
        size += _ITEM + size_of(value)
        check_size(size)
        yield value


def check_comparisons(text: str, *wanted: Any) -> None:
    longest = max((len(value) for value in wanted if isinstance(value, str)), default=0)
    if len(text) * longest > MOST_COMPARISONS:
        raise TemplateError(f"it looks for {longest:,} characters in {len(text):,}")


def length(spaces: int | str) -> int:
    """The length of a text, or of spaces that a number stands for."""
    return len(spaces) if isinstance(spaces, str) else spaces


def checked_short(what: str, value: Any) -> Any:
    """A text or a number of spaces, if it is short."""
    if length(value) > MOST_SHORT:
        raise TemplateError(f"{what} is longer than {MOST_SHORT} characters")
    return value
