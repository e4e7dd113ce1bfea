"""A rounded weight whose levels learn: palette entries, or the scales of its rows.

The level of each element stays as second-order rounding chose it. Choices that follow the gradient
as if nothing were rounded (straight through, arXiv 1308.3432) showed no gain on SmolLM2 in four
bits within minutes: a wrong choice undoes what made up for another's error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from cetane.compress.encoded import Affine, Encoded, Palettized

FIRST, SECOND = 0.9, 0.98
"""Decay of the means of gradients and of their squares, a step (Adam, arXiv 1412.6980)."""
TINY = 1e-20


class Tunable(ABC):
    """One weight `(O, I)`, fp32; `indices` name a level of its row for each element."""

    def __init__(self, indices: Tensor, levels: Tensor) -> None:
        """`levels (G, K)` or `(O, 1)` are what is learnt."""
        self.indices, self.levels = indices.contiguous(), levels
        self.mean, self.square = torch.zeros_like(levels), torch.zeros_like(levels)
        self.values = torch.empty(indices.shape)
        """The rounded weight; a step changes it in place."""
        self.look_up()

    @abstractmethod
    def rows(self) -> Tensor:
        """The levels of every row, `(O, K)`."""

    @abstractmethod
    def of_levels(self, sums: Tensor) -> Tensor:
        """The gradient of the levels, by sums `(O, K)` of that of the rounded values."""

    @abstractmethod
    def distance(self) -> Tensor:
        """The unit that levels are moved by: the distance between two of a row, on average."""

    @abstractmethod
    def encoded(self) -> Encoded:
        """The constants."""

    def look_up(self) -> None:
        """Make the rounded weight of its levels."""
        from cetane.compress.kernels import over_rows  # here because numba takes a while to load
        from cetane.fitting import kernels

        rows = self.rows().contiguous().numpy()
        over_rows(kernels.look_up, rows, self.indices.numpy(), self.values.numpy())

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, number: int) -> None:
        """Learn from the gradient of the rounded values. `rate` is the step, in distances between
        two levels; `number` counts from 1."""
        from cetane.compress.kernels import over_rows
        from cetane.fitting import kernels

        sums = torch.empty(self.rows().shape)
        slopes = gradient.contiguous().numpy()
        over_rows(kernels.sum_by_level, slopes, self.indices.numpy(), sums.numpy())
        own = self.of_levels(sums)
        self.mean.mul_(FIRST).add_(own, alpha=1 - FIRST)
        self.square.mul_(SECOND).addcmul_(own, own, value=1 - SECOND)
        mean, square = self.mean / (1 - FIRST**number), self.square / (1 - SECOND**number)
        self.levels -= rate * self.distance() * mean / (square.sqrt() + TINY)
        self.look_up()

    def state(self) -> dict[str, Tensor]:
        """What goes on from here needs; means begin anew."""
        return {"levels": self.levels}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same weight."""
        self.levels = state["levels"]
        self.look_up()


class TunablePalette(Tunable):
    """Levels are palettes `(G, K)` of as many rows each."""

    def __init__(self, made: Palettized) -> None:
        self.bits, self.shape, self.lut_shape = made.bits, made.indices.shape, made.lut.shape
        lut = torch.from_numpy(made.lut.astype(np.float32).reshape(len(made.lut), -1))
        self.group = len(made.indices) // len(lut)
        super().__init__(torch.from_numpy(made.indices.reshape(len(made.indices), -1)), lut)

    def rows(self) -> Tensor:
        return self.levels.repeat_interleave(self.group, 0)

    def of_levels(self, sums: Tensor) -> Tensor:
        return sums.reshape(len(self.levels), self.group, -1).sum(1)

    def distance(self) -> Tensor:
        reach = self.levels.amax(1, keepdim=True) - self.levels.amin(1, keepdim=True)
        return reach / (self.levels.shape[1] - 1)

    def encoded(self) -> Palettized:
        lut = self.levels.numpy().astype(np.float16)
        order = lut.argsort(1, kind="stable")  # entries may have passed each other
        places = order.argsort(1).astype(np.uint8)
        own = self.indices.numpy().reshape(len(lut), -1)
        indices = np.take_along_axis(places, own, 1).reshape(self.shape)
        sorted_lut = np.take_along_axis(lut, order, 1).reshape(self.lut_shape)
        return Palettized(indices, sorted_lut, self.bits)


class TunableLinear(Tunable):
    """Levels are scales `(O, 1)` of the integers from −limit to limit."""

    def __init__(self, made: Affine) -> None:
        self.bits, self.shape = made.bits, made.data.shape
        self.limit = 2 ** (made.bits - 1) - 1
        self.integers = torch.arange(-self.limit, self.limit + 1.0)[None]
        data = made.data.reshape(len(made.data), -1).astype(np.int16) + self.limit
        scale = torch.from_numpy(made.scale.astype(np.float32).reshape(-1, 1))
        super().__init__(torch.from_numpy(data.astype(np.uint8)), scale)

    def rows(self) -> Tensor:
        return self.integers * self.levels

    def of_levels(self, sums: Tensor) -> Tensor:
        return (sums * self.integers).sum(1, keepdim=True)

    def distance(self) -> Tensor:
        return self.levels / self.limit

    def encoded(self) -> Affine:
        data = self.indices.numpy().astype(np.int16) - self.limit
        scale = self.levels.numpy().astype(np.float16)
        return Affine(
            data.astype(np.int8).reshape(self.shape),
            scale.reshape(-1, *[1] * (len(self.shape) - 1)),
            self.bits,
        )


def tunable(made: Encoded) -> Tunable | None:
    """A weight that can go on from its constants; None for one that is not rounded."""
    if isinstance(made, Palettized):
        return TunablePalette(made)
    return TunableLinear(made) if isinstance(made, Affine) else None
