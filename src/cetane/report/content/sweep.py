"""A sweep's points, as data."""

from typing import Literal

from cetane.validation import Data


class SweepAnswer(Data):
    """An answer to a smoke prompt."""

    id: str
    text: str
    expected: bool | None
    """Whether the answer has an expected word; None if no word is expected."""


class SweepPoint(Data):
    """One format of a sweep."""

    name: str
    method: str
    bits: float
    """Bits per weight, with scales and palettes."""
    bytes: int
    perplexity: float
    ratio: float
    """The perplexity, divided by that of the fp16 weights."""
    kl: float
    top1: float
    cosine: float | None
    """The worst shard's cosine."""
    target: str
    """The chip and the system that the next two are predicted for: a sweep of another chip may have
    judged only some of the points."""
    tok_s: float
    off_ane: float
    """The predicted share of weights that are read off the ANE."""
    best: bool
    """Whether no other point is as small and as good."""
    smoke: tuple[SweepAnswer, ...] = ()


class SweepQuality(Data):
    """The quality of a sweep's formats against their bits."""

    kind: Literal["quality"] = "quality"
    model: str
    text: str
    tokens: int
    points: tuple[SweepPoint, ...]
