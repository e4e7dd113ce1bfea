"""A checkpoint whose channels are turned: the same function, with weights that round better.

The residual stream, and the values of every attention head, can have another orthogonal basis. All
tensors that write to them or read from them must then be turned too. Outliers of single channels
then spread over all of them. Nothing is added at run time. Sources: QuaRot (arXiv 2404.00456),
SpinQuant (arXiv 2405.16406).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.stored_tensors import Identity
from cetane.checkpoint.wrapped import WrappedCheckpoint
from cetane.files import json_sha256

if TYPE_CHECKING:
    import torch

VERSION = 1
"""The version of the rotations. It is part of a checkpoint's identity: other rotations give other
weights."""
PIECE = 1 << 24
"""Elements that are turned at a time, in float64."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of every `size` channels in a row: x -> x Q.

    Q is a diagonal of signs times two symmetric matrices, so turning back is as cheap. One is a
    Hadamard matrix of the power of two in `size`, the other a Hartley matrix of the rest (cos +
    sin).
    """

    size: int

    def __call__(self, x: torch.Tensor, axis: int = -1, back: bool = False) -> torch.Tensor:
        """The channels of an axis turned, or turned back; float64."""
        moved = x.double().movedim(axis, -1)
        shape = moved.shape
        rows = moved.reshape(-1, self.size)
        made = rows.new_empty(rows.shape)
        step = max(1, PIECE // self.size)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            made[part] = self._turned(rows[part], back)
        return made.reshape(shape).movedim(-1, axis)

    def _turned(self, rows: torch.Tensor, back: bool) -> torch.Tensor:
        import torch

        flips = torch.tensor(signs(self.size), dtype=torch.float64)
        power = self.size & -self.size
        rest = self.size // power
        x = (rows if back else rows * flips).reshape(-1, rest, power)
        if rest > 1:
            x = hartley(rest) @ x
        half = 1
        while half < power:
            pairs = x.reshape(-1, power // (2 * half), 2, half)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            x = torch.stack([first + second, first - second], 2)
            half *= 2
        turned = x.reshape(-1, self.size) / math.sqrt(power)
        return turned * flips if back else turned


@cache
def signs(size: int) -> list[int]:
    """1 and -1 in an order that looks random, and is the same everywhere."""
    digest = hashlib.shake_256(f"rotation of {size} channels".encode()).digest(size)
    return [1 if byte & 1 else -1 for byte in digest]


@cache
def hartley(size: int) -> torch.Tensor:
    """The orthogonal, symmetric matrix of cos(2 pi i j / n) + sin(2 pi i j / n), float64."""
    import torch

    number = torch.arange(size, dtype=torch.float64)
    angles = 2 * math.pi * (torch.outer(number, number) % size) / size
    return (angles.cos() + angles.sin()) / math.sqrt(size)


@dataclass(frozen=True)
class Fold:
    """What becomes of one tensor. Each field is optional."""

    gain: str | None = None
    """The norm whose gains multiply the columns."""
    columns: Rotation | None = None
    rows: Rotation | None = None
    ones: bool = False
    """Whether all values become 1: a norm's gains that others have taken."""


class RotatedCheckpoint(WrappedCheckpoint):
    """A checkpoint with turned channels. Its head is a tensor of its own, since only the head takes
    the final norm's gains."""

    def __init__(
        self,
        base: Checkpoint,
        folds: Mapping[str, Fold],
        copies: Mapping[str, str],
        stream: Rotation | None,
    ) -> None:
        """`folds` by tensor; `copies` are tensors that the base has under another name; `stream`
        turns the residual stream, None leaves it as it is."""
        super().__init__(base)
        self.folds, self.copies, self.stream = folds, copies, stream
        if copies:
            self.config = base.config | {"tie_word_embeddings": False}

    def __contains__(self, name: object) -> bool:
        return name in self.copies or name in self.base

    def names(self) -> list[str]:
        return sorted({*self.base.names(), *self.copies})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(self.copies.get(name, name))

    def dtype(self, name: str) -> str:
        return self.base.dtype(self.copies.get(name, name))

    def read(self, name: str) -> torch.Tensor:
        return self._folded(name, self.base.read(self.copies.get(name, name)))

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if (fold := self.folds.get(name)) and fold.rows is not None:
            return self.read(name)[start:stop].clone()
        return self._folded(name, self.base.read_rows(self.copies.get(name, name), start, stop))

    def _folded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the base as it is here, float32."""
        fold = self.folds.get(name)
        if fold is None:
            return tensor
        if fold.ones:
            return tensor.float().fill_(1)
        if fold.gain is not None:
            tensor = tensor.double() * self.base.read(fold.gain).double()
        if fold.columns is not None:
            tensor = fold.columns(tensor)
        if fold.rows is not None:
            tensor = fold.rows(tensor, axis=0)
        return tensor.float()

    def identified(self, identity: Identity) -> str:
        content: Any = [
            VERSION, self.base.identified(identity), sorted(self.copies.items()),
            {name: astuple(fold) for name, fold in self.folds.items()},
        ]  # fmt: skip
        return json_sha256(content)
