"""The storage of a running program's values: the torch type of each MIL dtype, and conversions.

All floats are float32; "fp16" precision rounds them to values of float16. torch has few kernels for
unsigned integers, so those take the next wider signed type.
"""

import numpy as np
import torch
from torch import Tensor

from cetane.mil.dtypes import Array

STORAGE: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "fp16": torch.float32,
    "fp32": torch.float32,
    "int4": torch.int8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint1": torch.uint8,
    "uint2": torch.uint8,
    "uint3": torch.uint8,
    "uint4": torch.uint8,
    "uint6": torch.uint8,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
}

_HELD_AS = {
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}


def from_numpy(array: Array, dtype: str) -> Tensor:
    """A tensor with a copy of the array's values, in the storage type of a MIL dtype."""
    return torch.from_numpy(np.array(array, _HELD_AS[STORAGE[dtype]], order="C"))


def halves(array: Array) -> Array:
    """The array as float16, each value rounded once."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16)


def to_dtype(x: Tensor, dtype: str, rounds: bool) -> Tensor:
    """`x` in the storage type of a MIL dtype.

    With `rounds`, fp16 values are rounded: nearest, ties to even, overflow to infinity. numpy
    rounds them only once; torch would take doubles through float32.
    """
    if rounds and dtype == "fp16":
        if x.dtype == torch.float64:
            return from_numpy(halves(x.numpy()), dtype)
        return x.half().float()
    return x.to(STORAGE[dtype])
