"""The output of commands: text, tables and progress, or one JSON document with `--json`."""

import json
import math
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cetane.errors import CetaneError, escaped

if TYPE_CHECKING:
    from cetane.bundle import Bundle
    from cetane.checkpoint import Tokenizer
    from cetane.files import Progress

console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)
LINE_EVERY = 5.0
"""Seconds between two lines of progress, without a terminal."""
FIRST_LINE_AFTER = 2.0
"""Seconds until the first line of progress, without a terminal: a job that is silent gets one."""
START = "Once upon a time"
"""A text that any model continues."""


class Unbroken(str):
    """A value that users copy, such as a path: no line ends inside it, not even at a space."""


class HasVerdict(Protocol):
    """A result of the API that has a verdict."""

    @property
    def passed(self) -> bool: ...
    def as_json(self) -> dict[str, Any]: ...


Result = TypeVar("Result", bound=HasVerdict)


def conclude(result: Result, json: bool, show: Callable[[Result], None]) -> NoReturn:
    """Print a result, as JSON or by `show`, and end, with exit code 1 unless it passed."""
    if json:
        print_json(result.as_json())
    else:
        show(result)
    raise typer.Exit(0 if result.passed else 1)


def print_json(content: Any) -> None:
    """Print one JSON document on one line. NaN and infinity become null."""
    print(json.dumps(finite(content), allow_nan=False))


def finite(content: Any) -> Any:
    """`content` with None in place of every float that is not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def say(text: str) -> None:
    """Print a line on standard output, without added line breaks, so that paths can be copied."""
    console.print(escaped(text), markup=False, soft_wrap=True)


def several(count: int, thing: str) -> str:
    """A number of things: "1 package", "5 packages"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def say_wrapped(text: str) -> None:
    """Print a sentence that nobody copies: its lines end between words."""
    for line in between_words(text, console.width):
        say(line)


def between_words(text: str, width: int) -> list[str]:
    """A sentence in lines of at most `width` characters, if its words let it."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(escaped(text), max(20, width), subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def say_next(*words: object, options: Mapping[str, object] | None = None) -> None:
    """Print the command that comes next."""
    say(f"next: {command(*words, options=options)}")


def say_bundle(bundle: "Bundle", kept: bool, then: str = "") -> None:
    """Print where a bundle is, its size, and whether it was written now or before."""
    size = sum(record.bytes for record in bundle.manifest.files.values())
    say(f"{'kept' if kept else 'wrote'} {bundle.path}: {megabytes(size)}{then}")


def say_next_run(folder: Path) -> None:
    """Print the command that runs a bundle: a conversation, if its model has a template for one.

    Some templates refuse a question without a system text, and some a question that is text.
    """
    from cetane.bundle import Bundle

    tokenizer = Bundle(folder).tokenizer
    system, question = ({"role": role, "content": "Hello"} for role in ("system", "user"))
    if not tokenizer.has_chat_template:
        say_next("run", folder, START)
    elif renders(tokenizer, question):
        say_next("run", folder, "--chat")
    elif renders(tokenizer, system, question):
        say("its chat template wants a system text before questions: begin with /system TEXT")
        say_next("run", folder, "--chat")
    else:
        say("its chat template refuses questions as texts, so tokens are given instead")
        say_next("run", folder, "--prompt-ids", ",".join(map(str, tokenizer.encode(START))))


def renders(tokenizer: "Tokenizer", *messages: dict[str, str]) -> bool:
    """Whether a chat template takes a conversation."""
    with suppress(CetaneError):
        tokenizer.render_chat(messages)
        return True
    return False


def command(*words: object, options: Mapping[str, object] | None = None) -> str:
    """A command of cetane, as a shell takes it. `options` are by name: None and False leave one
    out, True is a switch, and a list repeats it."""
    given: list[object] = []
    for name, value in (options or {}).items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                text = f"{one:g}" if isinstance(one, float) else one  # 26, as users write it
                given += [name] if one is True else [name, text]
    return shlex.join(["cetane", *map(str, (*words, *given))])


def warn(text: str) -> None:
    """Print a line on the error stream."""
    errors.print(escaped(text), markup=False, soft_wrap=True)


def warn_wrapped(text: str) -> None:
    """Print a sentence on the error stream. Its lines end between words on a terminal; a log has
    it on one line, which a search finds."""
    for line in between_words(text, errors.width) if errors.is_terminal else [text]:
        warn(line)


def show_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on the error stream, a sentence each."""
    for warning in warnings:
        warn_wrapped(f"warning: {warning}")


@contextmanager
def progress(title: str) -> Iterator["Progress"]:
    """A context with a progress bar on the error stream, which disappears afterwards.

    Without a terminal, it prints a line every few seconds. What cetane logs meanwhile is printed
    too, and stays.
    """
    with printed_log():
        update, close = on_terminal(title) if errors.is_terminal else in_log(title)
        try:
            yield update
        finally:
            close()


@contextmanager
def printed_log() -> Iterator[None]:
    """A context in which each record of cetane's log is a sentence on the error stream."""
    import logging

    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: warn_wrapped(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("cetane")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


def on_terminal(title: str) -> tuple["Progress", Callable[[], None]]:
    """A spinner, a bar and the time."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
        TimeElapsedColumn(), console=errors, transient=True,
    )  # fmt: skip
    task = bar.add_task(title, total=None)
    bar.start()

    def update(what: str, done: int, total: int) -> None:
        told = escape(escaped(f"{title}: {what}")[:40])
        bar.update(task, description=told, completed=done, total=total)

    return update, bar.stop


def in_log(title: str) -> tuple["Progress", Callable[[], None]]:
    """Lines at most every few seconds. A job that soon has told nothing tells its title."""
    last = 0.0
    title_only = Timer(FIRST_LINE_AFTER, warn, [title])
    title_only.daemon = True
    title_only.start()

    def update(what: str, done: int, total: int) -> None:
        nonlocal last
        title_only.cancel()
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            warn(f"{title}: {what} ({done}/{total})")

    return update, title_only.cancel


def tell_kernels(update: "Progress", backend: str) -> None:
    """Say that the first run on a machine compiles kernels: it takes far longer than later ones."""
    from cetane.mil.fast.compiled import is_kept

    on_mac = backend == "coreml" or (backend == "auto" and sys.platform == "darwin")
    if not on_mac and not is_kept():
        update("compiling, once on this machine", 0, 1)


def cell(value: Any) -> str:
    """A value as a table's text, escaped: it may come from a stranger's file."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else escaped(str(value))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table that is at most as wide as the terminal; numbers are right-aligned.

    Words are never broken. If the columns do not fit, they stand closer. If that is not enough,
    every row becomes a list of its cells.
    """
    values = list(zip(columns, *rows, strict=True))
    widths = [max(map(longest, column)) for column in values]
    room = console.width - sum(widths) - len(columns) - 1  # edges and dividers
    apart = 2 * (len(columns) - 1)  # with padding between columns
    padding = 1 if room >= apart else 0
    room -= padding * apart
    if room < 0:
        print_lists(title, columns, rows)
        return
    whole = [max(len(cell(value)) for value in column) - least
             for column, least in zip(values, widths, strict=True)]  # fmt: skip
    for left, index in enumerate(sorted(range(len(columns)), key=whole.__getitem__)):
        more = min(whole[index], room // (len(columns) - left))
        widths[index], room = widths[index] + more, room - more
    console.print(Text(escaped(title), "bold"))
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        justify = "right" if numeric else "left"
        result.add_column(name, justify=justify, width=widths[index])  # type: ignore[arg-type]
    for row in rows:
        result.add_row(*(escape(cell(value)) for value in row))
    console.print(result)


def longest(value: Any) -> int:
    """The length of a value's longest word."""
    return max(map(len, lines_of(value, 1)), default=0)


def lines_of(value: Any, width: int) -> list[str]:
    """A value's text in lines of at most `width` characters, if its words let it."""
    text = cell(value)
    if isinstance(value, Unbroken):
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def print_lists(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows as lists of cells; the first cell is the heading."""
    console.print(Text(escaped(title), "bold"), soft_wrap=True)
    for row in rows:
        say(f"  {cell(row[0])}")
        facts(dict(zip(columns[1:], row[1:], strict=True)), indent=4)
    console.print()


def facts(values: Mapping[str, Any], title: str = "", indent: int = 2) -> None:
    """Print names and values below each other, without empty values. Lines end between words. If
    all values are empty, nothing is printed, not even the title."""
    shown = {name: value for name, value in values.items() if cell(value)}
    if title and shown:
        console.print(Text(escaped(title), "bold"), soft_wrap=True)
    width = max(map(len, shown), default=0)
    room = max(20, console.width - indent - width - 2)
    for name, value in shown.items():
        lines = lines_of(value, room)
        for heading, line in zip([name, *[""] * len(lines)], lines, strict=False):
            say(f"{'':{indent}}{heading:{width}}  {line}")


def verdict(passed: bool) -> str:
    """A verdict, as rich markup."""
    return "[bold green]pass[/]" if passed else "[bold red]FAIL[/]"


def with_unit(value: float | None, unit: str) -> str | None:
    """A measured value with its unit, in four digits or whole; None where there is none."""
    if value is None:
        return None
    return f"{value:.4g} {unit}" if value < 9999.5 else f"{value:,.0f} {unit}"


def megabytes(count: float) -> str:
    """A number of bytes in megabytes, with its unit. Those of tiny models need more digits."""
    return f"{count / 1e6:.{1 if count >= 1e6 else 3}f} MB"
