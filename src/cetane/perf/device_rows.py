"""What kits measured: each row has its work with it."""

from collections.abc import Iterator
from typing import Any

from cetane.errors import CetaneError
from cetane.hardware.chips import find_chip
from cetane.perf.cost import Work
from cetane.perf.measurement import MOST, FileKind, Kind, Measurement, Row, number
from cetane.validation import parse_json, validated

COLUMNS = ("id", "model", "chip", "what", "kind", "ms", "works", "source")


def measurements_of(file: str, row: Row) -> Iterator[Measurement]:
    """A row that `cetane import` wrote: its work was computed from the bundle's own plan."""
    where = f"{file}, row {row['id']}"
    works = validated(list[Work], parse_json(row["works"], where), where)
    ms = number(row, "ms")
    amounts = [amount for work in works for amount in amounts_of(work)]
    if ms is None or not all(0 <= amount <= MOST**2 for amount in amounts):
        raise CetaneError(f"{where}: its time or its work is not a positive number")
    if not any(work.calls for work in works):
        raise CetaneError(f"{where}: its work calls no program")
    try:
        chip = find_chip(row["chip"])
    except CetaneError as error:
        raise CetaneError(f"{where}: {error.message}") from error
    kinds: Any = Kind  # mypy takes a choice of texts for no type
    kind = validated(kinds, row["kind"], where)
    yield Measurement.of_row(file, row, chip, row["what"], kind, works, ms)


def amounts_of(work: Work) -> Iterator[float]:
    """All numbers of a work."""
    yield from (work.calls, work.any_unit, work.tokens, work.attention_macs)
    yield from (work.memory, work.border, work.sorted, work.host)
    yield from (number for pair in work.weights.items() for number in pair)


DEVICE = FileKind(marks=("works", "ms"), columns=COLUMNS, parse=measurements_of)
