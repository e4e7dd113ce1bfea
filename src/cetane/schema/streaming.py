"""Which key/value heads keep all tokens, and which stream: the scores that `cetane heads` writes,
and a recipe's choice by them (DuoAttention, arXiv 2410.10819)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cetane.files import read_named
from cetane.validation import Data, Finite, read_already

LARGEST_SCORES = 1 << 22
"""Bytes."""

ScoreMethod = Literal["mass", "gates"]


class HeadScores(Data):
    """How much a model needs all tokens in each key/value head."""

    source: str
    """The checkpoint's name."""
    model_type: str
    method: ScoreMethod
    """`mass`: the share of attention that falls on a pass key while the model repeats it. `gates`:
    trained weights of full attention against streaming."""
    settings: dict[str, Finite]
    """The method's settings, by name."""
    layers: tuple[Annotated[tuple[Finite, ...], Field(max_length=1024)], ...] = Field(
        max_length=4096
    )
    """A score for each key/value head of each layer; empty for a layer that cannot stream, such as
    a sliding one."""


class Streaming(Data):
    """Key/value heads whose caches keep only the first tokens of a sequence and the newest."""

    scores: Annotated[HeadScores, read_already("scores")]
    """In a recipe file: the path, relative to the recipe's folder, of scores that `cetane heads`
    wrote."""
    full: float = Field(default=0.5, ge=0, le=1)
    """The share of the heads with a score that keep all tokens: those with the highest."""
    sinks: int = Field(default=64, ge=0)
    """The number of first tokens that the other heads see."""
    window: int = Field(default=256, ge=1)
    """The number of last tokens that the other heads see."""

    def kept(self) -> dict[int, tuple[int, ...]]:
        """The heads that keep all tokens, ascending, of every layer that has scores."""
        ranked = sorted(
            (-score, layer, head)
            for layer, scores in enumerate(self.scores.layers)
            for head, score in enumerate(scores)
        )
        chosen = {(layer, head) for _, layer, head in ranked[: round(self.full * len(ranked))]}
        return {
            layer: tuple(head for head in range(len(scores)) if (layer, head) in chosen)
            for layer, scores in enumerate(self.scores.layers)
            if scores
        }


def load_scores(path: Path) -> HeadScores:
    """Read scores from their file. Raises CetaneError if the file holds none."""
    return read_named(
        HeadScores, path, LARGEST_SCORES, "cache.streaming.scores", "cetane heads makes one"
    )
