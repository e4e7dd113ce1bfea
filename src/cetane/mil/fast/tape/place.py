"""Places: where the values of a tape lie.

A place is a base (the arena, the weights, an input, an output), an offset, a shape and strides. So
most moves of elements cost nothing: a transpose is another order of strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

ARENA, WEIGHTS, RUNS_AT, FIRST = range(4)
"""Bases: the arena, the weights, the runs of keys (int64); then inputs, states and outputs."""


@dataclass(frozen=True)
class Place:
    """Where a value lies. `block` names a piece of the arena, which gets its offset at the end;
    then `offset` counts from its start. Offsets and strides count floats, or bytes if `narrow`:
    elements are int8 then, which only `WIDEN` reads."""

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int | None = None
    narrow: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        return self.lies_as(self.at(0, self.shape, strides_of(self.shape)))

    @property
    def joined(self) -> Place:
        """The same elements in the same order, with as few axes as possible."""
        shape: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if shape and strides[-1] == size * stride:
                shape[-1], strides[-1] = shape[-1] * size, stride
            elif size != 1:
                shape.append(size)
                strides.append(stride)
        return self.at(0, shape, strides)

    def lies_as(self, other: Place) -> bool:
        """Whether its elements lie as those of another place of this shape, from the same offset
        on."""
        return self.offset == other.offset and all(
            size == 1 or own == usual
            for size, own, usual in zip(self.shape, self.strides, other.strides, strict=True)
        )

    def shares(self, other: Place) -> bool:
        """Whether both lie in the same array or block."""
        return (self.base, self.block) == (other.base, other.block)

    def at(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Place:
        """A part of this place, or its elements in another order."""
        return Place(
            self.base, self.offset + offset, tuple(shape), tuple(strides), self.block, self.narrow
        )

    def broadcast(self, shape: Sequence[int]) -> Place:
        """This place, repeated along axes of size 1, and along new axes in front."""
        missing = len(shape) - len(self.shape)
        strides = [0] * missing + [
            0 if size == 1 else stride
            for size, stride in zip(self.shape, self.strides, strict=True)
        ]
        return self.at(0, shape, strides)

    def moved(self, bases: Mapping[int, int]) -> Place:
        """This place, in the array of its block's base, if the block has one."""
        base = None if self.block is None else bases.get(self.block)
        return self if base is None else replace(self, base=base, block=None)

    def reshaped(self, shape: Sequence[int]) -> Place | None:
        """The same elements in another shape; None if that needs a copy."""
        probe = np.lib.stride_tricks.as_strided(
            np.empty(1, np.uint8), self.shape, self.strides, writeable=False
        )
        try:
            view = np.reshape(probe, shape, copy=False)
        except ValueError:
            return None
        return self.at(0, view.shape, view.strides)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
