"""Encoded weights: the constants that ship, and the weights that Core ML decodes from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cetane.errors import CetaneError
from cetane.threads import over_rows

Half = npt.NDArray[np.float16]
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Dense:
    """A plain fp16 constant."""

    weight: Half

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its array, by the name `weight`."""
        return {"weight": self.weight}

    def decode(self) -> Half:
        """The weight itself, fp16."""
        return self.weight


@dataclass(frozen=True, eq=False)
class Affine:
    """The inputs of `constexpr_blockwise_shift_scale`, without offset.

    `data` is int8 with the weight's shape (O, I, ...) and values of 8 or 4 `bits`, not packed.
    `scale` is fp16 of the same rank. Its shape is (O, 1, ...) for one scale an output channel, or
    (1, 1, ...) for one scale in all. Scales of blocks have (O, blocks, 1, ...); blocks divides I.
    """

    data: npt.NDArray[np.int8]
    scale: Half
    bits: int

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, by the input names of its MIL op."""
        return {"data": self.data, "scale": self.scale}

    def decode(self) -> Half:
        """`data · scale`, fp16 of shape (O, I, ...), rounded once."""
        blocks = self.scale.shape[1]
        rows = self.data.reshape(len(self.data), blocks, -1).astype(np.float32)
        product = rows * self.scale.reshape(-1, blocks, 1).astype(np.float32)
        return product.reshape(self.data.shape).astype(np.float16)

    def times(self, factor: float) -> Self:
        """The constants of `factor` times the weight. CetaneError for more than fp16 holds."""
        return replace(self, scale=_times(self.scale, factor))

    def packed(self) -> npt.NDArray[np.uint8]:
        """The data as two's complements in weight.bin: uint8 (⌈elements · bits / 8⌉,)."""
        if self.bits == 8:
            return self.data.reshape(-1).view(np.uint8)
        return packed(self.data.view(np.uint8) & np.uint8(2**self.bits - 1), self.bits)


@dataclass(frozen=True, eq=False)
class Palettized:
    """The inputs of `constexpr_lut_to_dense`, with one look-up table a group of output channels.

    An entry is V weights of neighbouring output channels. `indices` is uint8 of shape (O / V, I,
    ...) with values below 2**bits, not packed; `lut` is fp16 of shape (groups, 1, ..., 2**bits, V),
    where groups divides O / V.
    """

    indices: npt.NDArray[np.uint8]
    lut: Half
    bits: int

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its arrays, by the input names of its MIL op."""
        return {"indices": self.indices, "lut": self.lut}

    def decode(self) -> Half:
        """The entry at each index, fp16 of shape (O, I, ...); exact."""
        groups, vector = self.lut.shape[0], self.lut.shape[-1]
        rows, *inner = self.indices.shape
        indices = self.indices.reshape(groups, -1)
        entries = self.lut.reshape(groups, -1, vector)
        parts = [np.take_along_axis(entries[..., part], indices, axis=1) for part in range(vector)]
        weight = np.stack([part.reshape(rows, -1) for part in parts], axis=1)
        return weight.reshape(rows * vector, *inner)

    def times(self, factor: float) -> Self:
        """The constants of `factor` times the weight. CetaneError for more than fp16 holds."""
        return replace(self, lut=_times(self.lut, factor))

    def packed(self) -> npt.NDArray[np.uint8]:
        """The indices in weight.bin, one after the other, from the lowest bit up.

        uint8 of shape (⌈indices · bits / 8⌉,). Unused bits of the last byte are zero.
        """
        return packed(self.indices, self.bits)


Encoded = Dense | Affine | Palettized


def largest_scale(limit: int) -> np.float16:
    """The largest scale of integers up to `limit` whose products fp16 holds."""
    most = np.float16(LARGEST / limit)
    return most if float(most) * limit <= LARGEST else np.nextafter(most, np.float16(0))


def _times(values: Half, factor: float) -> Half:
    """Values times a factor, rounded once."""
    if factor == 1:
        return values
    with np.errstate(over="ignore"):
        made = (values.astype(np.float32) * np.float32(factor)).astype(np.float16)
    if not np.isfinite(made).all():
        raise CetaneError(f"a constant times {factor:g} is not finite in fp16")
    return made


def stacked(parts: Sequence[Encoded]) -> Encoded:
    """The constants of matrices of one format as those of one matrix: the rows of all of them."""
    first = parts[0]
    if isinstance(first, Dense):
        return Dense(joined(parts, "weight"))
    if isinstance(first, Affine):
        return Affine(joined(parts, "data"), joined(parts, "scale"), first.bits)
    return Palettized(joined(parts, "indices"), joined(parts, "lut"), first.bits)


def joined(parts: Sequence[Encoded], name: str) -> npt.NDArray[Any]:
    """An array of all parts, row after row."""
    return np.concatenate([getattr(part, name) for part in parts])


def packed(values: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Values of `bits` bits, one after the other, from the lowest bit up. Unused bits are zero."""
    from cetane.compress import kernels  # here because numba takes a while to load

    flat = values.reshape(-1)
    eights = np.pad(flat, (0, -flat.size % 8)) if flat.size % 8 else flat
    result = np.empty((eights.size // 8, bits), dtype=np.uint8)
    over_rows(kernels.pack, eights.view("<u8"), result)
    return result.reshape(-1)[: -(-flat.size * bits // 8)]
