"""A rounded weight that learns its levels, and which level each element has.

Levels are palette entries, or integers times the scale of their row. Each element has a wish: a
value that is rounded to the nearest level. The gradient of the rounded value moves the wish, as if
nothing were rounded (straight through, arXiv 1308.3432). The wish begins midway between the level
that second-order rounding chose and the weight of the checkpoint. So an element gets another level
only if many gradients say so.

All of it happens on the device of the weight; constants and states are on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from cetane.compress.encoded import Affine, Encoded, Palettized
from cetane.fitting import loops
from cetane.fitting.loops import TINY

FIRST, SECOND = 0.9, 0.98
"""Decay of the means of gradients and of their squares, a step (Adam, arXiv 1412.6980)."""
DEPTH = 0.5
"""An element's wish begins at this share of the way from its level to its weight. The way ends at
the level's border if the weight lies beyond it."""


class Tunable(ABC):
    """One weight `(O, I)`, fp32, each of whose elements has one of some levels."""

    bits: int
    """Bits of an element."""

    def __init__(self, indices: Tensor, levels: Tensor, shape: tuple[int, ...]) -> None:
        """`levels` are what is learnt, on the device that learns; `shape` is `(O, I)`."""
        self.indices, self.levels = indices.to(levels.device).contiguous(), levels
        self.mean, self.square = torch.zeros_like(levels), torch.zeros_like(levels)
        self.values = levels.new_empty(shape)
        """The rounded weight; a step changes it in place."""
        self.look_up()

    @abstractmethod
    def look_up(self) -> None:
        """Fill the rounded weight with the levels of its elements."""

    @abstractmethod
    def distance(self) -> Tensor:
        """The unit that levels are moved by: the distance between two of a row, on average."""

    @abstractmethod
    def encoded(self) -> Encoded:
        """The constants."""

    @abstractmethod
    def step(self, gradient: Tensor, rate: float, number: int, pull: float = 0.0) -> None:
        """Learn from the gradient of the rounded values, fp32. `rate` is the step of a level and
        `pull` that of an element's wish, in distances between two levels; `number` counts from
        1."""

    def learn(self, gradient: Tensor, rate: float, number: int) -> None:
        """Move the levels against the mean of their gradients."""
        self.mean.mul_(FIRST).add_(gradient, alpha=1 - FIRST)
        self.square.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        first, second = 1 - FIRST**number, 1 - SECOND**number
        self.levels -= (
            rate * self.distance() * (self.mean / first) / ((self.square / second).sqrt() + TINY)
        )

    def state(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs, on the CPU. Means begin anew there."""
        return {"levels": self.levels.cpu(), "indices": self.indices.cpu()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same weight."""
        device = self.values.device
        self.levels, self.indices = state["levels"].to(device), state["indices"].to(device)
        self.mean.zero_()
        self.square.zero_()
        self.look_up()


class Movable(Tunable):
    """A weight whose elements can move to other levels of their row: `indices (O, I)`."""

    def __init__(self, indices: Tensor, levels: Tensor, weight: Tensor) -> None:
        """`levels (G, K)` or `(O, 1)` are what is learnt; `weight (O, I)` is the checkpoint's."""
        super().__init__(indices, levels, tuple(indices.shape))
        self.wanted = self.between(weight)
        self.means = torch.zeros_like(self.wanted)
        """The means of the gradients of `wanted`, `(O, I)`."""
        self.squares = [levels.new_zeros(size) for size in indices.shape]
        """The mean squares of these gradients: of rows `(O,)`, in units of the columns, and of
        columns `(I,)` (as Adafactor's, arXiv 1804.04235). In a `down_proj` a few columns have
        gradients 15 to 39 times their row's. With one rate for a row, their elements alone would
        reach other levels, within ten steps."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The levels of every row, ascending, `(O, K)`."""

    @abstractmethod
    def of_levels(self, sums: Tensor) -> Tensor:
        """The gradient of the levels, from sums `(O, K)` of the rounded values' gradients."""

    @abstractmethod
    def distances(self) -> Tensor:
        """The distance between two levels of every row, on average, `(O,)`."""

    @abstractmethod
    def tidy(self) -> None:
        """Have the levels of a row ascend again."""

    def between(self, weight: Tensor) -> Tensor:
        """The first wishes `(O, I)`: the weights, pulled towards their levels."""
        rows, places = self.rows(), self.indices.long()
        borders = (rows[:, 1:] + rows[:, :-1]) / 2
        reach = rows.new_full((len(rows), 1), torch.inf)
        lower = torch.cat([-reach, borders], 1).gather(1, places)
        upper = torch.cat([borders, reach], 1).gather(1, places)
        inside = torch.minimum(torch.maximum(weight, lower), upper)
        return torch.lerp(self.values, inside, DEPTH).contiguous()

    def look_up(self) -> None:
        loops.look_up(self.rows().contiguous(), self.indices, self.values)

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, number: int, pull: float = 0.0) -> None:
        slopes, of_rows, of_columns = gradient.contiguous(), *self.squares
        sums, squared = torch.empty_like(self.rows()), torch.empty_like(of_columns)
        loops.gather(slopes, self.indices, sums, squared)
        self.learn(self.of_levels(sums), rate, number)
        self.tidy()
        first, second = 1 - FIRST**number, 1 - SECOND**number
        of_columns.mul_(SECOND).add_(squared / len(gradient), alpha=1 - SECOND)
        loops.follow(
            slopes, self.rows().contiguous(), (pull * self.distances() / first).contiguous(),
            (of_columns / second + TINY).rsqrt(), FIRST, SECOND, second, of_rows,
            self.wanted, self.means, self.indices, self.values,
        )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"wanted": self.wanted.half().cpu()}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.wanted = state["wanted"].to(self.values.device).float()
        for mean in (self.means, *self.squares):
            mean.zero_()


def spacing(levels: Tensor, count: int) -> Tensor:
    """The mean distance between two of `count` levels that reach as far as these, along axis 1."""
    return (levels.amax(1, keepdim=True) - levels.amin(1, keepdim=True)) / (count - 1)


class StoredPalettes:
    """How a weight's constants store palettes: `G` of them, of `K` vectors of `V` elements."""

    def __init__(self, made: Palettized) -> None:
        self.shape, self.lut_shape, self.bits = made.indices.shape, made.lut.shape, made.bits
        self.group = len(made.indices) // len(made.lut)
        """The rows of indices for each palette."""

    def read(self, made: Palettized) -> tuple[Tensor, Tensor]:
        """The indices, uint8 `(O / V, I)`, and the levels, fp32 `(G, K, V)`."""
        indices = torch.from_numpy(made.indices.reshape(len(made.indices), -1).copy())
        lut = made.lut.astype(np.float32).reshape(len(made.lut), *made.lut.shape[-2:])
        return indices, torch.from_numpy(lut)

    def encoded(self, indices: Tensor, levels: Tensor) -> Palettized:
        """The constants of other indices and levels."""
        lut = levels.cpu().numpy().astype(np.float16).reshape(self.lut_shape)
        return Palettized(indices.cpu().numpy().reshape(self.shape), lut, self.bits)


class TunableVectors(Tunable):
    """A weight with palettes of vectors, `(G, K, V)`, each for O / G rows; `indices (O / V, I)`.

    Vectors keep their entries: to move them takes time and gained nothing.
    """

    def __init__(self, made: Palettized, device: torch.device) -> None:
        self.stored = StoredPalettes(made)
        indices, levels = self.stored.read(made)
        vector = levels.shape[2]
        self.bits, self.group = made.bits // vector, self.stored.group
        super().__init__(indices, levels.to(device), (len(indices) * vector, indices.shape[1]))

    def look_up(self) -> None:
        entries = self.levels.repeat_interleave(self.group, 0)
        loops.look_up_vectors(entries, self.indices, self.values)

    def distance(self) -> Tensor:
        return spacing(self.levels, 2**self.bits)

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, number: int, pull: float = 0.0) -> None:
        sums = self.levels.new_empty(len(self.indices), *self.levels.shape[1:])
        loops.gather_vectors(gradient.contiguous(), self.indices, sums)
        self.learn(sums.reshape(len(self.levels), self.group, *sums.shape[1:]).sum(1), rate, number)
        self.look_up()

    def encoded(self) -> Palettized:
        return self.stored.encoded(self.indices, self.levels)


class TunablePalette(Movable):
    """A weight with palettes `(G, K)`, each for O / G rows."""

    def __init__(self, made: Palettized, weight: Tensor) -> None:
        self.stored = StoredPalettes(made)
        indices, levels = self.stored.read(made)
        self.bits, self.group = made.bits, self.stored.group
        super().__init__(indices, levels[..., 0].to(weight.device), weight)

    def rows(self) -> Tensor:
        return self.levels.repeat_interleave(self.group, 0)

    def of_levels(self, sums: Tensor) -> Tensor:
        return sums.reshape(len(self.levels), self.group, -1).sum(1)

    def distance(self) -> Tensor:
        return spacing(self.levels, self.levels.shape[1])

    def distances(self) -> Tensor:
        return self.distance()[:, 0].repeat_interleave(self.group)

    def tidy(self) -> None:
        self.levels, order = self.levels.sort(1)
        self.mean, self.square = self.mean.gather(1, order), self.square.gather(1, order)

    def encoded(self) -> Palettized:
        return self.stored.encoded(self.indices, self.levels)


class TunableLinear(Movable):
    """A weight with scales `(O, 1)` of the integers from −limit to limit."""

    def __init__(self, made: Affine, weight: Tensor) -> None:
        self.bits, self.shape = made.bits, made.data.shape
        self.limit = 2 ** (made.bits - 1) - 1
        self.integers = torch.arange(-self.limit, self.limit + 1.0, device=weight.device)[None]
        data = made.data.reshape(len(made.data), -1).astype(np.int16) + self.limit
        scale = torch.from_numpy(made.scale.astype(np.float32).reshape(-1, 1))
        scale = scale.to(weight.device)
        super().__init__(torch.from_numpy(data.astype(np.uint8)), scale, weight)

    def rows(self) -> Tensor:
        return self.integers * self.levels

    def of_levels(self, sums: Tensor) -> Tensor:
        return (sums * self.integers).sum(1, keepdim=True)

    def distance(self) -> Tensor:
        return self.levels / self.limit

    def distances(self) -> Tensor:
        return self.levels[:, 0]

    def tidy(self) -> None:
        self.levels.clamp_(min=TINY)

    def encoded(self) -> Affine:
        data = self.indices.cpu().numpy().astype(np.int16) - self.limit
        scale = self.levels.cpu().numpy().astype(np.float16)
        return Affine(
            data.astype(np.int8).reshape(self.shape),
            scale.reshape(-1, *[1] * (len(self.shape) - 1)),
            self.bits,
        )


def tunable(made: Affine | Palettized, weight: Tensor) -> Tunable:
    """A weight `(O, I)`, fp32, that learns from its constants on, on its device."""
    if isinstance(made, Affine):
        return TunableLinear(made, weight)
    alone = made.lut.shape[-1] == 1
    return TunablePalette(made, weight) if alone else TunableVectors(made, weight.device)
