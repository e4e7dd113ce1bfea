"""What the benchmarks share: arguments, bundles, the text, and how results are printed."""

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.engine.session import Session
from cetane.gates.reference import Reference, would_choose
from cetane.lab.workload import write_documentation
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe

WORK = Path("build/bench")
console = Console(stderr=False)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="a Hugging Face folder, a GGUF file, or a hub id")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser


def bundle_of(checkpoint: Checkpoint, recipe: Recipe) -> Bundle:
    """A bundle under build/bench, built if it is not there."""
    WORK.mkdir(parents=True, exist_ok=True)

    def progress(what: str, done: int, total: int) -> None:
        print(f"build {recipe.name}: {what} ({done}/{total})", file=sys.stderr)

    return build(checkpoint, recipe, WORK / recipe.name, progress)


def all_logits(session: Session, tokens: Sequence[int]) -> Array:
    """The logits of all tokens that a session is fed, fp32 `(len(tokens), V)`."""
    logits = session.feed(tokens, "all")
    assert logits is not None
    return logits


def agreement(reference: Reference, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of an answer's tokens that the reference chooses too."""
    logits = reference.run([[*prompt, *answer]])[0].logits
    return float(would_choose(logits, prompt, answer).mean())


def standard_library_text() -> Path:
    """Documentation of Python's standard library as plain text: the same on every machine that
    runs the same Python."""
    path = WORK / f"stdlib-{platform.python_version()}.txt"
    if not path.exists():
        write_documentation(path)
    return path


def put_lines(page: Path, name: str, lines: Iterable[str]) -> None:
    """Replace what is between `<!-- name -->` and `<!-- end of name -->` on a page.

    Ends the process if the page does not have each mark once.
    """
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text(encoding="utf-8")
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{page}: needs {start} and {end} once each")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    content = "\n".join([start, "", *lines, "", end])
    page.write_text(f"{before}{content}{after}", encoding="utf-8")


def report(title: str, columns: list[str], rows: list[list[Any]], result: dict[str, Any],
           as_json: bool) -> None:  # fmt: skip
    """Print a table, and with --json the result as the last line."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    console.print(table)
    if as_json:
        print(json.dumps(result))
