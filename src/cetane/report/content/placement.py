"""Where ops run, as data."""

from cetane.gates.residency.rule import Placement
from cetane.validation import Data


class Column(Data):
    """A block of a shard. All experts to which tokens are routed share a column."""

    shard: str
    block: str


class Cell(Data):
    """Ops of one kind in one block: their number by place, and the rules that placed them."""

    placed: dict[Placement, int]
    rules: tuple[str, ...]


class KindRow(Data):
    """One kind of op in every block; None if a block has no such op."""

    kind: str
    ops: int
    cells: tuple[Cell | None, ...]


class PlacementMap(Data):
    """The map of one mode: kinds of op by blocks."""

    mode: str
    tokens: int
    ops: int
    placed: dict[Placement, int]
    columns: tuple[Column, ...]
    rows: tuple[KindRow, ...]


class Reason(Data):
    """A rule, or evidence, that placed ops."""

    rule: str
    placement: Placement
    confidence: str
    ops: int
    kinds: tuple[str, ...]
    message: str
    fix: str
    source: str


class Residency(Data):
    """The places where ops run, and the reasons."""

    target: str
    basis: str
    """Predicted, measured, or some of each."""
    weights_off_ane: float
    maps: tuple[PlacementMap, ...]
    reasons: tuple[Reason, ...]
