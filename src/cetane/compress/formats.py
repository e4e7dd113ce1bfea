"""Compression formats: a name that says what is done, and the encoding it stands for.

| name | constants |
| --- | --- |
| `fp16` | the weight |
| `int8-per-channel` | int8, one fp16 scale an output channel; linear, symmetric |
| `int8-per-tensor` | int8, one fp16 scale |
| `palette4-kmeans-group32` | 4-bit indices, one palette of 16 fp16 values per 32 output channels |
| `palette6-uniform-per-tensor` | 6-bit indices, one evenly spaced palette |

A palette has 1, 2, 3, 4, 6 or 8 bits. Output channels are axis 0 of a weight.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from cetane.compress import palettes
from cetane.compress.encoded import Affine, Dense, Encoded, Half, Palettized
from cetane.errors import CetaneError

Weight = npt.NDArray[np.float16] | npt.NDArray[np.float32]
Shape = tuple[int, ...]


class Format(ABC):
    """One way to store a weight. Formats are values: equal when their names are.

    `bits` is the number of bits per weight, scales and palettes not counted.
    """

    bits: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The name `parse_format` reads."""

    @abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Bytes of the constants for a weight of this shape, indices packed to bits."""

    @abstractmethod
    def encode(self, weight: Weight) -> Encoded:
        """The constants for a weight, fp16 or fp32 of shape (O, I, ...).

        The weight is rounded to fp16 first, the type it is computed with. What `Fp16` returns may
        be the weight itself, not a copy. Raises CetaneError for a
        value that fp16 cannot hold and for a shape that `check` refuses.
        """

    def check(self, shape: Shape, name: str) -> None:  # noqa: B027, most formats take any shape
        """Raises CetaneError if the weight called `name`, of this shape, cannot be encoded."""


@dataclass(frozen=True)
class Fp16(Format):
    name = "fp16"
    bits = 16

    def nbytes(self, shape: Shape) -> int:
        return 2 * math.prod(shape)

    def encode(self, weight: Weight) -> Dense:
        return Dense(_to_half(weight))


@dataclass(frozen=True)
class Int8(Format):
    """Linear and symmetric: values from −127 to 127, scale = max|w| / 127, no offset.

    Bit for bit coremltools' `linear_symmetric`, except where the scale rounds to zero: the values
    are then zero as well, where coremltools casts a division by zero.
    """

    per: Literal["channel", "tensor"]
    bits = 8

    @property
    def name(self) -> str:
        return f"int8-per-{self.per}"

    def nbytes(self, shape: Shape) -> int:
        scales = shape[0] if self.per == "channel" else 1
        return math.prod(shape) + 2 * scales

    def encode(self, weight: Weight) -> Affine:
        from cetane.compress import kernels  # here because numba takes a while to load

        half = _to_half(weight)
        rows = half.reshape(len(half), -1).view(np.uint16)
        largest = np.empty(len(rows), dtype=np.uint16)
        kernels.over_rows(kernels.largest, rows, largest)
        if self.per == "tensor":
            largest = largest.max(keepdims=True)
        scale = largest.view(np.float16) / np.float16(127)
        data = np.empty(rows.shape, dtype=np.int8)
        scales = np.broadcast_to(scale, len(rows)).astype(np.float32)
        kernels.over_rows(kernels.int8, rows, scales, data)
        return Affine(data.reshape(half.shape), scale.reshape(-1, *[1] * (half.ndim - 1)))


@dataclass(frozen=True)
class Palette(Format):
    """Indices into 2**bits fp16 values, one palette for each `group` output channels or for all.

    `uniform` spaces the values evenly from the least to the greatest weight, bit for bit as
    coremltools does; `kmeans` places them for the least squared error.
    """

    bits: int
    mode: Literal["uniform", "kmeans"]
    group: int | None

    @property
    def name(self) -> str:
        per = "per-tensor" if self.group is None else f"group{self.group}"
        return f"palette{self.bits}-{self.mode}-{per}"

    def nbytes(self, shape: Shape) -> int:
        entries = self._groups(shape) << self.bits
        return (math.prod(shape) * self.bits + 7) // 8 + 2 * entries

    def check(self, shape: Shape, name: str) -> None:
        if self.group is not None and shape[0] % self.group:
            raise CetaneError(
                f"{name} has shape {shape}: {self.name} cannot divide its {shape[0]} output "
                f"channels into groups of {self.group}",
                "choose a group size that divides them, or give this weight another format",
            )

    def encode(self, weight: Weight) -> Palettized:
        self.check(weight.shape, "the weight")
        half = _to_half(weight)
        groups = half.reshape(self._groups(half.shape), -1)
        choose = palettes.uniform if self.mode == "uniform" else palettes.kmeans
        lut, indices = choose(groups, self.bits)
        lut_shape = (len(groups), *[1] * (half.ndim - 1), 2**self.bits, 1)
        return Palettized(indices.reshape(half.shape), lut.reshape(lut_shape), self.bits)

    def _groups(self, shape: Shape) -> int:
        return 1 if self.group is None else shape[0] // self.group


_PALETTE = re.compile(r"palette([123468])-(uniform|kmeans)-(?:group([1-9][0-9]*)|per-tensor)")


def parse_format(name: str) -> Format:
    """The format a name stands for; CetaneError with the grammar if there is none."""
    if name == "fp16":
        return Fp16()
    if name == "int8-per-channel":
        return Int8("channel")
    if name == "int8-per-tensor":
        return Int8("tensor")
    if match := _PALETTE.fullmatch(name):
        bits, mode, group = match.groups()
        return Palette(
            bits=int(bits),
            mode=cast(Literal["uniform", "kmeans"], mode),
            group=None if group is None else int(group),
        )
    raise CetaneError(
        f"unknown compression format {name!r}",
        "write fp16, int8-per-channel, int8-per-tensor, "
        "palette{1,2,3,4,6,8}-{uniform,kmeans}-group{N} or "
        "palette{1,2,3,4,6,8}-{uniform,kmeans}-per-tensor; for example palette4-kmeans-group32",
    )


def _to_half(weight: Weight) -> Half:
    """The weight in fp16 and C order: itself, if it is so already."""
    with np.errstate(over="ignore"):
        half = np.asarray(weight, dtype=np.float16, order="C")
    # The patterns from these on are infinite or no number; numpy's isfinite is 25 times slower.
    positive, negative = half.view(np.int16).max(initial=0), half.view(np.uint16).max(initial=0)
    if positive >= 0x7C00 or negative >= 0xFC00:
        raise CetaneError(f"a weight of {np.abs(weight).max():g} is not finite in fp16")
    return half
