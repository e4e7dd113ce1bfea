"""Figures of quality and size, as data."""

from typing import Literal

from cetane.evaluation.figures import TaskFigure
from cetane.validation import Data


class PositionRow(Data):
    """An output tensor of a shard: its cosine with the reference at every position."""

    shard: str
    tensor: str
    mode: str
    cosine: float
    """The smallest of the probes' means."""
    worst: float
    worst_at: int | None
    values: tuple[float, ...]
    """The smallest cosines of every `per_column` positions."""


class Positions(Data):
    """Agreement with the reference, by shard and position."""

    kind: Literal["positions"] = "positions"
    per_column: int
    positions: int
    rows: tuple[PositionRow, ...]


class BlockRange(Data):
    """The largest magnitude of the residual stream after a block."""

    block: str
    largest: float


class Ranges(Data):
    """The residual stream, compared with the largest fp16 number."""

    kind: Literal["ranges"] = "ranges"
    end: float
    near: float
    """The magnitude from which a block gets a warning."""
    largest: BlockRange
    share: float
    """The largest magnitude, divided by `end`."""
    blocks: tuple[BlockRange, ...]


class PartSize(Data):
    """The size on disk of a part: a file, or a shard's files."""

    name: str
    bytes: int
    share: float
    """Its bytes, divided by those of the largest part."""
    weights: int | None = None
    bits: float | None = None
    """The mean bits of a stored weight, with scales and palettes."""


class DiskUse(Data):
    """Bytes on disk."""

    bytes: int
    weights: int
    mean_bits: float
    """The mean bits of a stored weight, with scales and palettes."""
    parts: tuple[PartSize, ...]
    caches: dict[int, int]
    """Bytes of the key/value cache, by context length."""


class Perplexity(Data):
    """The perplexities of the bundle and of the reference on a text."""

    kind: Literal["perplexity"] = "perplexity"
    text: str
    tokens: int
    value: float
    reference: float
    ratio: float
    limit: float
    kl: float
    top1: float


class Tasks(Data):
    """The figures of an evaluation."""

    kind: Literal["tasks"] = "tasks"
    figures: tuple[TaskFigure, ...]
    limit: int | None
    fewshot: int | None
    """The number of examples before each sample; None if each task chose."""
    chat: bool
    """Whether the requests were turns of a conversation."""
    compared: bool
    """Whether the reference answered the same requests."""
    nats: float | None
    warnings: tuple[str, ...]
