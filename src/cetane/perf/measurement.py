"""A measurement of decoding, and what the rows of all files of evidence have in common."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from cetane.hardware.chips import Chip, chip_of
from cetane.perf.cost import Work
from cetane.perf.shapes import Decoder, load_decoders

Row = dict[str, str]
Kind = Literal["step", "part", "prefill", "verify"]
UNUSABLE = {
    "prewarm": "a first step",
    "host loaded": "the machine was busy",
    "locked IOSurface": "its buffers were locked",
    "LUT explosion": "its palettes had grown",
    "GPU in practice": "not on the ANE",
    "poorly ANE routed": "not on the ANE",
}
"""Remarks in rows that make a measurement unusable, with the reasons."""
MOST = 1e12
"""The most of any number in a row, of whatever unit; the least is 1 / `MOST`. So the products and
quotients of several stay finite."""


@dataclass(frozen=True)
class Measurement:
    """The measured milliseconds of programs, called one after another."""

    file: str
    id: str
    model: str
    chip: Chip
    what: str
    kind: Kind
    works: tuple[Work, ...]
    ms: float
    source: str

    @classmethod
    def of_row(
        cls,
        file: str,
        row: Row,
        chip: Chip,
        what: str,
        kind: Kind,
        works: Iterable[Work],
        ms: float,
    ) -> Self:
        """What a row of a file measured in `ms` milliseconds: these works, on this chip."""
        source = row["source"]
        return cls(file, row["id"], row["model"], chip, what, kind, tuple(works), ms, source)

    @property
    def group(self) -> str:
        """The group that is left out together: a model on a device."""
        return f"{self.model} / {self.chip.id}"


class Unusable(Exception):
    """The reason why a row cannot be used."""


@dataclass(frozen=True)
class FileKind:
    """A kind of files of evidence."""

    marks: tuple[str, str]
    """Two columns that no other kind has both of."""
    columns: tuple[str, ...]
    """All columns that a file must have."""
    parse: Callable[[str, Row], Iterator[Measurement]]
    """A function of the file's name and a row. Raises Unusable if the row gives no measurement."""


def number(row: Row, column: str) -> float | None:
    """A positive number of a row, within `MOST`; None if it holds anything else."""
    return positive(row.get(column) or "")


def positive(text: str) -> float | None:
    """A positive number within `MOST`; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 1 / MOST <= value <= MOST else None


def whole(digits: str) -> int:
    """Digits as a whole number, at most `MOST`. Raises Unusable for a larger one."""
    if float(digits) > MOST:
        raise Unusable(f"the number {digits[:16]}... is too large")
    return int(digits)


def decoder(row: Row) -> Decoder:
    """The shapes of a row's model. Raises Unusable if they are not known."""
    decoder = load_decoders().get(row["model"])
    if decoder is None:
        raise Unusable("its shapes are not known")
    return decoder


def chip(device: str) -> Chip:
    """The chip of a device in the evidence. Raises Unusable if it is not known."""
    chip = chip_of(device)
    if chip is None:
        raise Unusable(f"the chip of {device!r} is not known")
    return chip


def check_remarks(row: Row) -> None:
    """Raise Unusable if a row's remarks say so (`UNUSABLE`)."""
    remarks = row.get("note") or row.get("notes") or ""
    for words, reason in UNUSABLE.items():
        if words in remarks:
            raise Unusable(f"{reason}: {remarks}")
