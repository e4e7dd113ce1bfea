"""A weight that is rounded while it learns: its levels, and which level each element has.

The model computes with rounded values. The gradient of those moves the levels, palette entries or
scales, by the sum over all elements that have them; and it moves an unrounded copy of every element
as if nothing were rounded (straight through, arXiv 1308.3432), which takes another level when it
crosses the middle between two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cetane.compress.encoded import Affine, Encoded, Palettized
from cetane.compress.kernels import over_rows
from cetane.fitting import kernels

FIRST, SECOND = 0.9, 0.98
"""Decay of the means of gradients and of their squares, a step."""
INSIDE = 0.8
"""How near to the middle between two levels an element begins, at most."""
TINY = 1e-20


@dataclass(frozen=True)
class Rates:
    """Step sizes, in distances between two levels of a row."""

    elements: float
    levels: float


class Tunable(ABC):
    """One weight `(O, I)`, fp32; `indices` name a level of its row for each element."""

    def __init__(self, weight: Tensor, indices: Tensor, levels: Tensor) -> None:
        """`weight` is what was rounded; `levels (G, K)` or `(O, 1)` are what is learnt."""
        self.indices, self.levels = indices.contiguous(), levels
        weight = weight.contiguous()
        self.means = [torch.zeros_like(levels), torch.zeros_like(levels)]
        self.mean = torch.zeros_like(weight)
        self.square = torch.zeros(len(weight), 1)
        self.values = self.rows().gather(1, indices.long())
        """The rounded weight; `step` changes it in place."""
        self.latent = self.first_latent(weight)

    @abstractmethod
    def rows(self) -> Tensor:
        """The levels of every row, ascending, `(O, K)`."""

    @abstractmethod
    def of_levels(self, sums: Tensor) -> Tensor:
        """The gradient of the levels, by sums `(O, K)` of that of the rounded values."""

    @abstractmethod
    def encoded(self) -> Encoded:
        """The constants."""

    def first_latent(self, weight: Tensor) -> Tensor:
        """As near to the weight as an element can be without another level than it has."""
        rows, chosen = self.rows(), self.indices.long()
        value = self.values
        middle = (rows[:, 1:] + rows[:, :-1]) / 2
        far = torch.full_like(middle[:, :1], torch.finfo(torch.float32).max)
        above = torch.cat([middle, far], 1).gather(1, chosen) - value
        below = value - torch.cat([-far, middle], 1).gather(1, chosen)
        return value + torch.clamp(weight - value, -INSIDE * below, INSIDE * above)

    @torch.no_grad()
    def step(self, gradient: Tensor, rates: Rates, number: int) -> None:
        """Learn from the gradient of the rounded values; `number` counts from 1."""
        rows = self.rows()
        slopes = gradient.contiguous().numpy()
        sums, squares = np.empty(rows.shape, np.float32), np.empty(len(rows), np.float32)
        over_rows(kernels.sum_by_level, slopes, self.indices.numpy(), sums, squares)
        distance = (rows[:, -1:] - rows[:, :1]) / (rows.shape[1] - 1)
        first, second = 1 - FIRST**number, 1 - SECOND**number
        own = self.of_levels(torch.from_numpy(sums))
        mean, square = self.means
        mean.mul_(FIRST).add_(own, alpha=1 - FIRST)
        square.mul_(SECOND).addcmul_(own, own, value=1 - SECOND)
        scale = self.level_distance(distance)
        self.levels -= rates.levels * scale * (mean / first) / ((square / second).sqrt() + TINY)
        self.levels = self.levels.sort(1).values  # entries that met are alike
        self.square.mul_(SECOND).add_(torch.from_numpy(squares)[:, None], alpha=1 - SECOND)
        sizes = rates.elements * distance / first / ((self.square / second).sqrt() + TINY)
        over_rows(
            lambda *parts: kernels.move(*parts, np.float32(FIRST)),
            slopes, self.rows().contiguous().numpy(), sizes[:, 0].numpy(), self.mean.numpy(),
            self.latent.numpy(), self.indices.numpy(), self.values.numpy(),
        )  # fmt: skip

    @abstractmethod
    def level_distance(self, distance: Tensor) -> Tensor:
        """The unit that levels are moved by, from the distances `(O, 1)` of the rows' levels."""

    def state(self) -> dict[str, Tensor]:
        """What goes on from here needs; means begin anew."""
        return {"levels": self.levels, "indices": self.indices, "latent": self.latent.half()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same weight."""
        self.levels, self.indices = state["levels"], state["indices"]
        self.latent = state["latent"].float()
        self.values.copy_(self.rows().gather(1, self.indices.long()))


class TunablePalette(Tunable):
    """Levels are palettes `(G, K)` of as many rows each."""

    def __init__(self, weight: Tensor, made: Palettized) -> None:
        self.bits, self.shape, self.lut_shape = made.bits, made.indices.shape, made.lut.shape
        lut = torch.from_numpy(made.lut.astype(np.float32).reshape(len(made.lut), -1))
        self.group = len(weight) // len(lut)
        indices = torch.from_numpy(made.indices.reshape(len(weight), -1).copy())
        super().__init__(weight, indices, lut)

    def rows(self) -> Tensor:
        return self.levels.repeat_interleave(self.group, 0)

    def of_levels(self, sums: Tensor) -> Tensor:
        return sums.reshape(len(self.levels), self.group, -1).sum(1)

    def level_distance(self, distance: Tensor) -> Tensor:
        return distance[:: self.group]

    def encoded(self) -> Palettized:
        lut = self.levels.numpy().astype(np.float16)
        indices = self.indices.numpy().reshape(self.shape)
        return Palettized(indices, lut.reshape(self.lut_shape), self.bits)


class TunableLinear(Tunable):
    """Levels are scales `(O, 1)` of the integers from −limit to limit."""

    def __init__(self, weight: Tensor, made: Affine) -> None:
        self.bits, self.shape = made.bits, made.data.shape
        self.limit = 2 ** (made.bits - 1) - 1
        self.integers = torch.arange(-self.limit, self.limit + 1.0)[None]
        data = torch.from_numpy(made.data.reshape(len(weight), -1).astype(np.int16) + self.limit)
        scale = torch.from_numpy(made.scale.astype(np.float32).reshape(-1, 1))
        super().__init__(weight, data.to(torch.uint8), scale)

    def rows(self) -> Tensor:
        return self.integers * self.levels.clamp(min=TINY)

    def of_levels(self, sums: Tensor) -> Tensor:
        return (sums * self.integers).sum(1, keepdim=True)

    def level_distance(self, distance: Tensor) -> Tensor:
        return distance / self.limit

    def encoded(self) -> Affine:
        data = self.indices.numpy().astype(np.int16) - self.limit
        scale = self.levels.numpy().astype(np.float16)
        return Affine(
            data.astype(np.int8).reshape(self.shape),
            scale.reshape(-1, *[1] * (len(self.shape) - 1)),
            self.bits,
        )


def tunable(weight: Tensor, made: Encoded) -> Tunable | None:
    """A weight that can go on from its constants; None for one that is not rounded."""
    if isinstance(made, Palettized):
        return TunablePalette(weight, made)
    return TunableLinear(weight, made) if isinstance(made, Affine) else None
