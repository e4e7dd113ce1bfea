"""The arrays of the fast executor: float32 and int32 in place of the program's own widths."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array, kind
from cetane.mil.program import TensorType

HELD_AS: dict[str, type[np.generic]] = {
    "fp16": np.float32,
    "fp32": np.float32,
    "bool": np.bool_,
    **{
        f"{sign}int{bits}": np.int32
        for sign in ("", "u")
        for bits in (1, 2, 3, 4, 6, 8, 16, 32)
        if (sign, bits) != ("u", 32)
    },
}
"""The numpy type of an array, by the MIL dtype that it stands for. uint32 and integers of 64 bits
have none: int32 does not hold them."""


def held(array: Array, dtype: str) -> Array:
    """An array of a MIL dtype in the form that a graph takes, copied only if necessary.

    Raises CetaneError for a dtype that no graph takes.
    """
    if dtype not in HELD_AS:
        raise CetaneError(f"the fast executor has no arrays of {dtype}")
    return np.ascontiguousarray(array, HELD_AS[dtype]).reshape(array.shape)


def accepted(name: str, array: Array, type_: TensorType) -> Array:
    """A caller's input in the form that a session takes. Raises CetaneError if it does not fit.

    Caches of int8 stay as they are: most of their slots are hidden, so a call widens only some.
    """
    array = np.asarray(array)
    if (
        array.dtype == np.float32
        and array.shape == type_.shape
        and array.flags.c_contiguous
        and HELD_AS.get(type_.dtype) is np.float32
    ):
        return array  # the case of nearly all inputs
    if kind(array.dtype) != kind(np.dtype(NUMPY[type_.dtype])) or not type_.accepts(array.shape):
        raise CetaneError(f"input {name}: expected {type_}, got {array.dtype} {array.shape}")
    if type_.dtype == "int8" and array.dtype == np.int8:
        return array
    converted = held(array, type_.dtype)
    if converted.dtype.kind == "i" and not np.array_equal(converted, array):
        raise CetaneError(f"input {name}: has values that do not fit {type_.dtype}")
    return converted


def declared(array: Array, type_: TensorType) -> Array:
    """A session's result for the caller: floats as float32, others in the program's dtype."""
    dtype = np.float32 if array.dtype.kind == "f" else NUMPY[type_.dtype]
    return array.astype(dtype, copy=False)


def align(data: BinaryIO) -> None:
    """Move a file to the next 4096 bytes: ONNX requires it of weights that are mapped."""
    data.seek(-(-data.tell() // 4096) * 4096)
