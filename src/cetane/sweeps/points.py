"""The results of a sweep, one JSON object a line. Reports read them, and so does a later sweep.

A line of `sweep.jsonl` is a `Point`; a line of `layers.jsonl` is a `LayerScore`. Each is appended
when it is measured; its `key` is a hash of everything that it depends on. One file may hold lines
of several models and texts. `cetane.ledger` tells how it survives a crash.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.files import json_sha256
from cetane.gates.residency.target import DEFAULT_OS, Target
from cetane.ledger import Ledger
from cetane.validation import Data, Drawn

Name = Annotated[str, Field(max_length=255)]
"""A name of a point or of a text's file. Plots and tables have it."""
PointMethod = Literal[
    "fp16", "linear", "uniform", "kmeans", "weighted", "vector", "mixed", "gptq", "tuned"
]
"""The form of the constants, or what fitted them to the model."""


class SweptModel(Data):
    """The model that was compressed."""

    source: str
    fingerprint: str
    content: str = ""
    """`Checkpoint.content`: a hash of all files. Earlier sweeps had none."""


class JudgedText(Data):
    """The text that judged it: `tokens` tokens in windows of the recipe's context.

    They come after the tokens that measured the sensitivities.
    """

    name: Name
    sha256: str
    tokens: int


class Answer(Data):
    """A greedy answer to a smoke prompt."""

    id: str
    text: str
    same: int
    """The number of first tokens that equal those of the fp16 weights."""
    expected: bool | None
    """Whether the answer has an expected word; None if no word is expected."""


class Predicted(Data):
    """Predictions: a step's time by the cost model, and the weights' residency by the rules."""

    chip: str
    os: float = DEFAULT_OS
    """The number of the system, as in `Target.os`. Earlier sweeps had only this one."""
    decode_ms: float
    tok_s: float
    binds: str
    weights_off_ane: float
    """The share of weights whose convolution is predicted to run outside the ANE."""
    rules: tuple[str, ...]
    """The residency rules that apply to the weights."""

    @property
    def target(self) -> Target:
        """The chip and the system that the predictions are for."""
        return Target(self.chip, self.os)


class Point(Data):
    """One compression of a model, with its quality. Distances are to the fp16 weights."""

    version: Literal[1] = 1
    """The version of this schema."""
    key: str
    name: Name
    """The name of a format, with `+` and its method if it was fitted to the model; or `mixed-` and
    the bits per weight."""
    method: PointMethod
    bits: int | None
    """Bits of an element, without scales and palettes; None for mixed formats."""
    group: str | None
    """The weights that share a scale or a palette: `tensor`, `channel`, a number of output channels
    (`32`), or of input channels (`block32`)."""
    compression: Selection
    """The `[compression]` table of a recipe."""
    weight_bytes: int
    """Bytes of all shards' weights, as in `cetane plan`."""
    bits_per_weight: Drawn
    """Bits of the weights that formats are for, with scales and palettes."""
    perplexity: Drawn
    perplexity_ratio: float
    kl: float
    """Mean over tokens, in nats."""
    top1: float
    cosines: dict[str, float]
    """The mean cosine of the hidden tensor after each shard, in a chain of all shards."""
    smoke: tuple[Answer, ...]
    predicted: Predicted
    seconds: float
    model: SweptModel
    text: JudgedText
    producer: dict[str, str]


class LayerScore(Data):
    """KL to the fp16 weights when only one layer's weights of a kind are compressed."""

    key: str
    layer: int
    kind: str
    format: str
    kl: float


Line = TypeVar("Line", Point, LayerScore)


class KeyedLedger(Generic[Line]):
    """The lines of a file, by their keys. It only grows."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """Raises CetaneError for a whole line that is not a `kind`."""
        self._ledger: Ledger[Line] = open_ledger(path, kind)
        self._known: dict[str, Line] = {line.key: line for line in self._ledger.read()}

    def get(self, key: str) -> Line | None:
        return self._known.get(key)

    def lines(self) -> list[Line]:
        """All lines, the last of each key."""
        return list(self._known.values())

    def append(self, line: Line) -> None:
        """Append a line. If the machine stops halfway, the next sweep mends the file."""
        self._ledger.append(line)
        self._known[line.key] = line


def open_ledger(path: Path, kind: type[Line]) -> Ledger[Line]:
    """The lines of a file, which need not exist."""
    return Ledger(path, kind, "name another folder, or remove this file")


def read_points(path: Path) -> list[Point]:
    """The points of a `sweep.jsonl`, without a last line that was cut off.

    Raises CetaneError for another file.
    """
    if not path.is_file():
        raise CetaneError(f"{path}: no such file", "cetane sweep MODEL writes sweep.jsonl")
    return list({point.key: point for point in open_ledger(path, Point).read()}.values())


def key_of(*parts: str | Sequence[int] | Mapping[str, Any]) -> str:
    """A hash of everything that a line depends on."""
    return json_sha256(parts)


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both size and KL, largest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.weight_bytes, p.kl)):
        if not front or point.kl < front[-1].kl:
            front.append(point)
    return front[::-1]


def best(points: Sequence[Point], budget: int) -> Point | None:
    """The point of least KL with at most `budget` bytes of weights."""
    fitting = [point for point in points if point.weight_bytes <= budget]
    return min(fitting, key=lambda p: (p.kl, p.weight_bytes), default=None)
