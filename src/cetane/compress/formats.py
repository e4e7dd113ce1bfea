"""Compression formats: each has a name that a recipe uses, and an encoding.

| name | constants |
| --- | --- |
| `fp16` | the weight |
| `int8-per-channel` | int8, one fp16 scale an output channel; linear, symmetric |
| `int4-per-tensor` | int4, one fp16 scale |
| `int4-per-block32` | int4, one fp16 scale per 32 input channels of every output channel |
| `palette4-kmeans-group32` | 4-bit indices, one palette of 16 fp16 values per 32 output channels |
| `palette4-weighted-group32` | the same, placed for the least error of the layer's output |
| `palette6-uniform-per-tensor` | 6-bit indices, one evenly spaced palette |
| `palette4-kmeans-vector2-per-tensor` | 8-bit indices, one palette of pairs of weights |

A linear weight has 8 or 4 bits, a palette 1, 2, 3, 4, 6 or 8 for each weight. Entries of vectors
have one index for 2 or 4 neighbouring output channels, of 8 bits at most. Output channels are axis
0 of a weight, input channels axis 1.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from cetane.errors import CetaneError

if TYPE_CHECKING:  # a recipe is read without numpy
    from cetane.compress.encoded import Affine, Dense, Encoded, Palettized
    from cetane.compress.encoders import Sensitivity, Weight

Shape = tuple[int, ...]
PaletteMode = Literal["uniform", "kmeans", "weighted"]


class Format(ABC):
    """One way to store a weight. Two formats of one name are equal.

    `bits` is the number of bits per weight, without scales and palettes.
    """

    bits: int
    weighted = False
    """Whether `encode` needs sensitivities."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `parse_format` reads."""

    @abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Bytes of the constants for a weight of this shape, with indices packed to bits."""

    @abstractmethod
    def encode(self, weight: Weight, sensitivity: Sensitivity | None = None) -> Encoded:
        """The constants for a weight, fp16 or fp32 of shape (O, I, ...).

        The weight is rounded to fp16 first, since programs compute in fp16. `Fp16` may return the
        weight itself, not a copy. `sensitivity` multiplies the squared error of each element; it is
        fp32 of a shape that broadcasts to the weight's. Only `weighted` formats use it.
        Raises CetaneError for a value that fp16 cannot hold, a shape that `check` refuses, or a
        sensitivity that is missing or does not fit.
        """

    def check(self, shape: Shape, name: str) -> None:  # noqa: B027, most formats take any shape
        """Raise CetaneError if a weight of this shape cannot be encoded; `name` is for the
        message."""

    def fits(self, shape: Shape) -> bool:
        """Whether a weight of this shape can be encoded."""
        try:
            self.check(shape, "the weight")
        except CetaneError:
            return False
        return True


@dataclass(frozen=True)
class Fp16(Format):
    name = "fp16"
    bits = 16

    def nbytes(self, shape: Shape) -> int:
        return 2 * math.prod(shape)

    def encode(self, weight: Weight, sensitivity: Sensitivity | None = None) -> Dense:
        from cetane.compress import encoders

        return encoders.dense(weight)


@dataclass(frozen=True)
class Linear(Format):
    """Linear and symmetric: integers from −limit to limit, scale = max|w| / limit, no offset.

    The limit is 127 or 7. There is one scale for each output channel, for the whole weight, or for
    each block of `per` input channels. Bit for bit equal to coremltools' `linear_symmetric`, but
    for a scale that rounds to zero: the values are then zero, where coremltools divides by zero. A
    scale that rounds up by so much that its largest product is beyond fp16 is the next one below.
    """

    bits: int
    per: Literal["channel", "tensor"] | int

    @property
    def name(self) -> str:
        per = f"block{self.per}" if isinstance(self.per, int) else self.per
        return f"int{self.bits}-per-{per}"

    def nbytes(self, shape: Shape) -> int:
        return (math.prod(shape) * self.bits + 7) // 8 + 2 * math.prod(self.scales(shape))

    def check(self, shape: Shape, name: str) -> None:
        if isinstance(self.per, int) and (len(shape) < 2 or shape[1] % self.per):
            raise CetaneError(
                f"{name} has shape {shape}: {self.name} cannot divide its input channels into "
                f"blocks of {self.per}",
                "choose a block size that divides them, or give this weight another format",
            )

    def encode(self, weight: Weight, sensitivity: Sensitivity | None = None) -> Affine:
        from cetane.compress import encoders

        self.check(weight.shape, "the weight")
        return encoders.linear(weight, self.bits, self.scales(weight.shape), self.per == "tensor")

    def scales(self, shape: Shape) -> Shape:
        """The shape of a weight's scales."""
        outputs = 1 if self.per == "tensor" else shape[0]
        inner = [1] * (len(shape) - 1)
        if isinstance(self.per, int):
            inner[0] = shape[1] // self.per
        return (outputs, *inner)


GROUPS = (64, 32, 16, 8)
"""Sizes of groups that an ANE reads fast, the largest first."""


@dataclass(frozen=True)
class Palette(Format):
    """Indices into 2**bits fp16 values, one palette for each `group` output channels or for all.

    - `uniform` spaces the values evenly from the least to the greatest weight, bit for bit as
      coremltools does.
    - `kmeans` places them for the least squared error.
    - `weighted` multiplies each squared error by its sensitivity (SqueezeLLM, arXiv 2306.07629).

    An entry is a vector of `vector` neighbouring output channels (`cluster_dim` of coremltools). No
    report says how an ANE runs entries of more than one.
    """

    bits: int
    mode: PaletteMode
    group: int | None
    vector: int = 1

    @property
    def weighted(self) -> bool:  # type: ignore[override]
        return self.mode == "weighted"

    @property
    def name(self) -> str:
        per = "per-tensor" if self.group is None else f"group{self.group}"
        vector = "" if self.vector == 1 else f"vector{self.vector}-"
        return f"palette{self.bits}-{self.mode}-{vector}{per}"

    @property
    def index_bits(self) -> int:
        """Bits of an index."""
        return self.bits * self.vector

    def indices_shape(self, shape: Shape) -> Shape:
        """The shape of a weight's indices."""
        return (shape[0] // self.vector, *shape[1:])

    def lut_shape(self, shape: Shape) -> Shape:
        """The shape of a weight's palettes."""
        inner = (1,) * (len(shape) - 1)
        return (self.groups(shape), *inner, 1 << self.index_bits, self.vector)

    def nbytes(self, shape: Shape) -> int:
        return (math.prod(shape) * self.bits + 7) // 8 + 2 * math.prod(self.lut_shape(shape))

    def check(self, shape: Shape, name: str) -> None:
        if shape[0] % self.vector:
            raise CetaneError(
                f"{name} has shape {shape}: {self.name} cannot divide its {shape[0]} output "
                f"channels into vectors of {self.vector}",
                "give this weight another format",
            )
        if self.group is not None and shape[0] % self.group:
            found = next((size for size in GROUPS if not shape[0] % size), None)
            one = replace(self, group=found).name
            raise CetaneError(
                f"{name} has shape {shape}: {self.name} cannot divide its {shape[0]} output "
                f"channels into groups of {self.group}",
                f"{one} divides them: --set compression.default={one}, or give this weight another "
                "format in compression.names",
            )

    def encode(self, weight: Weight, sensitivity: Sensitivity | None = None) -> Palettized:
        from cetane.compress import encoders

        self.check(weight.shape, "the weight")
        return encoders.palettized(weight, self, sensitivity)

    def groups(self, shape: Shape) -> int:
        """How many palettes a weight has."""
        return 1 if self.group is None else shape[0] // self.group


_LINEAR = re.compile(r"int([48])-per-(channel|tensor|block([1-9][0-9]*))")
_PALETTE = re.compile(
    r"palette([123468])-(uniform|kmeans|weighted)-(?:vector([24])-)?"
    r"(?:group([1-9][0-9]*)|per-tensor)"
)
WIDTHS = (1, 2, 3, 4, 6, 8)
"""Bits of an index."""


def parse_format(name: str) -> Format:
    """The format of this name. Raises CetaneError with the grammar for an unknown name."""
    if name == "fp16":
        return Fp16()
    if match := _LINEAR.fullmatch(name):
        bits, per, block = match.groups()
        return Linear(int(bits), int(block) if block else cast(Literal["channel", "tensor"], per))
    if match := _PALETTE.fullmatch(name):
        bits, mode, vector, group = match.groups()
        form = Palette(
            bits=int(bits),
            mode=cast(PaletteMode, mode),
            group=None if group is None else int(group),
            vector=int(vector or 1),
        )
        spaced = vector is not None and mode == "uniform"  # vectors lie on no line
        divided = group is None or not int(group) % form.vector
        if form.index_bits in WIDTHS and divided and not spaced:
            return form
    raise CetaneError(
        f"unknown compression format {name!r}",
        "write fp16, int{4,8}-per-{channel,tensor,block{N}}, "
        "palette{1,2,3,4,6,8}-{uniform,kmeans,weighted}-group{N} or "
        "palette{1,2,3,4,6,8}-{uniform,kmeans,weighted}-per-tensor, "
        "palette{1,2,3,4}-{kmeans,weighted}-vector{2,4}-... with indices of 8 bits at most; "
        "for example palette4-kmeans-group32",
    )
