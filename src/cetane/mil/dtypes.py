"""MIL's data types: their names, their widths, and the numpy types that hold their elements."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUMPY: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "string": np.str_,
    "fp16": np.float16,
    "fp32": np.float32,
    "int4": np.int8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint1": np.uint8,
    "uint2": np.uint8,
    "uint3": np.uint8,
    "uint4": np.uint8,
    "uint6": np.uint8,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
"""The numpy types of arrays. Integers narrower than a byte take one byte each."""

FLOATS = ("fp16", "fp32")
"""The types of floats in programs."""
PACKED_BITS = {"int4": 4, "uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6}
"""Bits per element of the types that files store packed."""


def unpack(packed: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` unsigned `bits`-bit integers of a little-endian bit stream, one per byte.

    Every `bits` bytes hold exactly eight elements, so each such group is read as one 64-bit word.
    """
    if -(-count * bits // 8) > len(packed):
        raise ValueError(f"{count} elements of {bits} bits are not in {len(packed)} bytes")
    groups = -(-count // 8)
    padded = np.zeros(groups * bits, np.uint8)
    used = -(-count * bits // 8)
    padded[:used] = packed[:used]
    words = np.zeros(groups, np.uint64)
    for index, byte in enumerate(padded.reshape(groups, bits).T):
        words |= byte.astype(np.uint64) << np.uint64(8 * index)
    elements = np.empty((groups, 8), np.uint8)
    for index in range(8):
        elements[:, index] = (words >> np.uint64(bits * index)) & np.uint64((1 << bits) - 1)
    return elements.reshape(-1)[:count]


def from_bytes(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Array:
    """Decode an element buffer as Core ML stores it (little-endian, narrow integers packed)."""
    if dtype not in PACKED_BITS:
        return data.view(NUMPY[dtype]).reshape(shape)
    elements = unpack(data, PACKED_BITS[dtype], math.prod(shape))
    if dtype == "int4":  # two's complement
        return ((elements ^ 8).view(np.int8) - 8).reshape(shape)
    return elements.reshape(shape)


_KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}


def kind(dtype: np.dtype[Any]) -> str:
    """The kind of a numpy type, without its width: "float", "int", "bool", else its own name."""
    return _KINDS.get(dtype.kind) or str(dtype)  # the name of a dtype takes numpy a while


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """The number of bytes that Core ML stores for a tensor."""
    count = math.prod(shape)
    if dtype in PACKED_BITS:
        return -(-count * PACKED_BITS[dtype] // 8)
    return count * np.dtype(NUMPY[dtype]).itemsize
