"""Arrays in numpy's `.npy` form: one rule for every header that cetane reads.

numpy's own reader evaluates a header as Python, and would read a pickle.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cetane.errors import CetaneError
from cetane.files import open_regular

MAGIC = b"\x93NUMPY\x01\x00"
HEADER = re.compile(
    rb"\{'descr': '([<|][biuf][1248])', 'fortran_order': (False|True), "
    rb"'shape': \(((?:[0-9]{1,12}, ){0,11}[0-9]{1,12},?|)\), \} *\n"
)
"""The header that numpy writes for little-endian numbers and booleans, in version 1.0 of the form.
Version 2.0 is for headers over 65,535 bytes, which no such array needs."""


@dataclass(frozen=True)
class Header:
    """What a header says about the data that follow it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool
    """The first axis changes fastest ("Fortran order")."""
    start: int
    """Bytes before the data."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def read_header(file: IO[bytes]) -> Header:
    """The header at the start of a file. Raises ValueError unless it fits `MAGIC` and `HEADER`."""
    start = file.read(10)
    length = int.from_bytes(start[8:], "little")
    header = HEADER.fullmatch(file.read(length))
    if start[:8] != MAGIC or header is None:
        raise ValueError("not an array of numbers in the .npy format, version 1.0")
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError as error:  # such as "<b4"
        raise ValueError(f"the .npy format has no type {header[1].decode()}") from error
    shape = tuple(int(size) for size in header[3].decode().split(",") if size.strip())
    return Header(dtype, shape, header[2] == b"True", 10 + length)


def read_data(file: IO[bytes], header: Header) -> npt.NDArray[Any]:
    """The data that follow a header, which the caller has found to fit. Raises ValueError if they
    are fewer or more than it says."""
    data = file.read(header.nbytes + 1)
    if len(data) != header.nbytes:
        raise ValueError(f"its data are not the {header.nbytes} bytes of {header}")
    values = np.frombuffer(bytearray(data), header.dtype)
    if header.by_columns:
        return values.reshape(header.shape[::-1]).T
    return values.reshape(header.shape)


def open_array(
    path: Path, dtype: str, shape: tuple[int | None, ...]
) -> np.memmap[Any, np.dtype[Any]]:
    """A memory-mapped array of this dtype and shape; None stands for any length of an axis.

    Raises CetaneError for any other file, before anything is allocated or mapped.
    """
    try:
        with open_regular(path, follow=False) as file:
            header = read_header(file)
            wanted = len(header.shape) == len(shape) and all(
                a is None or a == b for a, b in zip(shape, header.shape, strict=True)
            )
            if header.dtype != np.dtype(dtype) or not wanted or header.by_columns:
                order = ", by columns" if header.by_columns else ""
                named = f"{np.dtype(dtype)} of shape {shape}"
                raise CetaneError(f"{path}: {header}{order}, not {named}")
            nbytes = path.stat().st_size - header.start
            if nbytes != header.nbytes:
                raise CetaneError(f"{path}: {nbytes} bytes do not fit {header}")
            return np.memmap(file, header.dtype, "r", header.start, header.shape)
    except (OSError, ValueError) as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
