"""The evidence: measurements of decoding on the ANE, as work and milliseconds.

The files are `data/evidence/*.csv`, and those that `cetane import` writes. Each row has its source,
and README.md there explains the columns. A row becomes a measurement of a step, and of every part
of it that was timed (`ane_book.py`, `coreml_llm.py`, `device_rows.py`). Rows that the model cannot
predict are left out, with the reason.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import read_text
from cetane.perf.ane_book import ANE_BOOK
from cetane.perf.coreml_llm import COREML_LLM
from cetane.perf.device_rows import DEVICE
from cetane.perf.measurement import FileKind, Measurement, Row, Unusable

KINDS = (ANE_BOOK, COREML_LLM, DEVICE)
HINT = f"cetane import writes {', '.join(DEVICE.columns)}"


@dataclass(frozen=True)
class Skipped:
    """A row of a decode step that is not used, and the reason."""

    file: str
    id: str
    model: str
    what: str
    why: str


def shipped() -> list[Path]:
    """The files that come with cetane."""
    folder = Path(str(resources.files("cetane"))) / "data" / "evidence"
    return sorted(folder.glob("*.csv"))


@cache
def load_evidence() -> tuple[tuple[Measurement, ...], tuple[Skipped, ...]]:
    """The measurements that ship, and the skipped rows."""
    return read(shipped())


def read(paths: Iterable[Path]) -> tuple[tuple[Measurement, ...], tuple[Skipped, ...]]:
    """The measurements in CSV files, and the rows of decode steps that give none."""
    used: list[Measurement] = []
    skipped: list[Skipped] = []
    for path in paths:
        for row, kind in rows(path):
            try:
                used += kind.parse(path.stem, row)
            except Unusable as reason:
                what = row.get("topology") or row.get("layout") or ""
                skipped.append(Skipped(path.stem, row["id"], row["model"], what, str(reason)))
    return tuple(used), tuple(skipped)


def rows(path: Path) -> Iterator[tuple[Row, FileKind]]:
    """The rows of a file, with its kind. Raises CetaneError for a file of another kind."""
    try:
        reader = csv.DictReader(read_text(path).splitlines())
        columns = reader.fieldnames or ()
        content = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise CetaneError(f"{path}: not a CSV file: {error}") from error
    kind = next((kind for kind in KINDS if set(kind.marks) <= set(columns)), None)
    if kind is None:
        known = " nor ".join(" and ".join(kind.marks) for kind in KINDS)
        raise CetaneError(f"{path}: it has neither the columns {known}", HINT)
    missing = [column for column in kind.columns if column not in columns]
    if missing:
        raise CetaneError(f"{path}: it lacks the columns {', '.join(missing)}", HINT)
    for line, row in content:
        if None in row or None in row.values():
            raise CetaneError(f"{path}: line {line} does not have {len(columns)} fields")
        yield row, kind
