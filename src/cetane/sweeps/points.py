"""What a sweep finds, one JSON object a line: read by reports, and by a sweep that goes on.

A line of `sweep.jsonl` is a `Point`; one of `layers.jsonl` is a `LayerScore`.
A line is appended when it is known, and says in `key` what it depends on. Lines of several models
and texts may stand in one file. `cetane.files.Ledger` says what a crash can do to it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.files import Ledger
from cetane.validation import Data

Method = Literal["fp16", "linear", "uniform", "kmeans", "weighted", "mixed"]


class SweptModel(Data):
    """What was compressed."""

    source: str
    fingerprint: str


class JudgedText(Data):
    """What it was judged on: `tokens` of a text, in windows of the recipe's context, after those
    that sensitivities were measured on."""

    name: str
    sha256: str
    tokens: int


class Answer(Data):
    """A greedy answer to a smoke prompt."""

    id: str
    text: str
    same: int
    """Tokens at its start that are those of the fp16 weights."""
    expected: bool | None
    """Whether a word that an answer should have is there; None where nothing is expected."""


class Predicted(Data):
    """What nobody measured: the cost model's step, and the residency rules' word on weights."""

    chip: str
    decode_ms: float
    tok_s: float
    binds: str
    weights_off_ane: float
    """The share of weights whose convolution is predicted to run elsewhere than on the ANE."""
    rules: tuple[str, ...]
    """The residency rules that apply to the weights."""


class Point(Data):
    """One compression of a model, and what is left of it. Distances are to the fp16 weights."""

    version: Literal[1] = 1
    """Of this schema."""
    key: str
    name: str
    """Of a format, or `mixed-` and its bits per weight."""
    method: Method
    bits: int | None
    """Of an element, scales and palettes not counted; None where formats are mixed."""
    group: str | None
    """What shares a scale or a palette: `tensor`, `channel`, output channels (`32`), or input
    channels (`block32`)."""
    compression: Selection
    """The `[compression]` table of a recipe."""
    weight_bytes: int
    """Of all shards, as `cetane plan` says."""
    bits_per_weight: float
    """Of the weights that formats are for, scales and palettes counted."""
    perplexity: float
    perplexity_ratio: float
    kl: float
    """Mean over tokens, in nats."""
    top1: float
    cosines: dict[str, float]
    """Mean cosine of the hidden tensor that each shard hands on, chained."""
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


class PointLedger(Generic[Line]):
    """The lines of a file by their keys; grows by appending."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """CetaneError for a line that is whole and no `kind`."""
        self._ledger: Ledger[Line] = ledger(path, kind)
        self._known: dict[str, Line] = {line.key: line for line in self._ledger.read()}

    def get(self, key: str) -> Line | None:
        return self._known.get(key)

    def append(self, line: Line) -> None:
        """Write a line, whole or, if the machine stops, in a way that the next sweep mends."""
        self._ledger.append(line)
        self._known[line.key] = line


def ledger(path: Path, kind: type[Line]) -> Ledger[Line]:
    """The lines of a file, which need not exist."""
    return Ledger(path, TypeAdapter(kind), "name another folder, or remove this file")


def read_points(path: Path) -> list[Point]:
    """The points of a `sweep.jsonl`, the last line left out if it was cut off.

    CetaneError for what is no such file.
    """
    if not path.is_file():
        raise CetaneError(f"{path}: no such file", "cetane sweep MODEL writes sweep.jsonl")
    return list({point.key: point for point in ledger(path, Point).read()}.values())


def key_of(*parts: str | Sequence[int] | Mapping[str, Any]) -> str:
    """A hash of what a line depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
