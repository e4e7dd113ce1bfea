"""What commands print: tables and progress for people, one JSON document with `--json`."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console()
errors = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a GGUF file, or a hub id.")]
BundlePath = Annotated[Path, typer.Argument(help="A bundle.")]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="A recipe that comes with cetane, or a .toml file.")
]


def print_json(content: Any) -> None:
    """One JSON document on one line; what JSON has no number for (a NaN) is null."""
    print(json.dumps(finite(content), allow_nan=False))


def finite(content: Any) -> Any:
    """`content` with None in place of every float that is not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def progress(title: str, shown: bool = True) -> Iterator[Any]:
    """A progress bar on the error stream; call it with what is being done, done, and total."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, disable=not shown) as bar:
        task = bar.add_task(title, total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done, total=total)
            if shown and not errors.is_terminal:
                errors.print(f"{title}: {what} ({done}/{total})", highlight=False)

        yield update


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A table; numbers are right-aligned."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        result.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*(escape(f"{v:.5g}" if isinstance(v, float) else str(v)) for v in row))
    console.print(result)


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.1f} MB"
