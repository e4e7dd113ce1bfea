"""Rules that make Hugging Face's tensors of those that a GGUF file keeps in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cetane.checkpoint.stored_tensors import StoredTensor

Config = Mapping[str, Any]
Array = np.ndarray
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A rule that makes a tensor of pieces of a file, in every layer that has these pieces."""

    name: str
    """The ending of the tensor's name."""
    parts: tuple[str, ...]
    """The endings of the names of the pieces, under which they were renamed."""
    make: Callable[..., Array]
    """`make(config, *pieces)`, of fp32 arrays. A ValueError if they do not fit each other."""
    shape: Callable[..., Shape] | None = None
    """A function that gives the tensor's shape, `shape(config, *shapes of pieces)`. None if each
    row of the tensor is made of the same row of each piece: then one row tells its shape."""


@dataclass(frozen=True, slots=True)
class MadeTensor(StoredTensor):
    """A tensor that is made of pieces after they are dequantised."""

    parts: tuple[StoredTensor, ...]
    make: Callable[..., Array]
    by_row: bool

    @classmethod
    def of(cls, config: Config, rule: TensorRule, parts: tuple[StoredTensor, ...]) -> MadeTensor:
        """The tensor by a rule. Its shape is tried on one row, or computed. ValueError if the
        pieces do not fit each other."""

        def make(*pieces: Array) -> Array:
            return rule.make(config, *pieces)

        first = parts[0]
        if rule.shape is not None:
            shape = rule.shape(config, *(part.shape for part in parts))
        else:
            if any(part.shape[0] != first.shape[0] for part in parts):
                raise ValueError("different numbers of rows")
            row = make(*(np.zeros((1, *part.shape[1:]), np.float32) for part in parts))
            shape = (first.shape[0], *row.shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        by_row = rule.shape is None
        return cls(first.file, first.offset, nbytes, shape, first.dtype, parts, make, by_row)

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Some rows; only of what is made row by row."""
        assert self.by_row
        parts = tuple(part.rows(start, stop) for part in self.parts)
        nbytes = sum(part.nbytes for part in parts)
        shape = (stop - start, *self.shape[1:])
        return MadeTensor(self.file, self.offset, nbytes, shape, self.dtype, parts, self.make, True)


def one_piece(
    name: str, make: Callable[..., Array], shape: Callable[..., Shape] | None
) -> TensorRule:
    """The rule of a tensor that is made of one piece, which has its name."""
    return TensorRule(name, (name,), make, shape)


def same_shape(config: Config, shape: Shape) -> Shape:
    return shape


def as_stored(config: Config, stored: Array) -> Array:
    return stored
