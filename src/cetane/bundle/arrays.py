"""Arrays on disk: `.npy` files whose header fits the manifest exactly."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.files import open_regular

MAGIC = b"\x93NUMPY\x01\x00"
HEADER = re.compile(
    rb"\{'descr': '([<|][fi][1248])', 'fortran_order': False, "
    rb"'shape': \(((?:[0-9]{1,12}, ){0,3}[0-9]{1,12},?)\), \} *\n"
)
"""The header that numpy writes for arrays of numbers in C order. numpy's own reader evaluates a
header as Python, and would read a pickle."""


def open_array(
    path: Path, dtype: str, shape: tuple[int | None, ...]
) -> np.memmap[Any, np.dtype[Any]]:
    """A memory-mapped array of this dtype and shape; None stands for any length of an axis.

    Raises CetaneError for any other file, before anything is allocated or mapped.
    """
    try:
        with open_regular(path, follow=False) as file:
            start = file.read(10)
            length = int.from_bytes(start[8:], "little")
            header = HEADER.fullmatch(file.read(length))
            if start[:8] != MAGIC or header is None:
                raise CetaneError(
                    f"{path}: not an array of numbers in the .npy format, version 1.0"
                )
            stored = tuple(int(n) for n in header[2].decode().split(",") if n.strip())
            wanted = len(stored) == len(shape) and all(
                a is None or a == b for a, b in zip(shape, stored, strict=True)
            )
            kind = np.dtype(header[1].decode())
            if kind != np.dtype(dtype) or not wanted:
                raise CetaneError(f"{path}: {kind} of shape {stored}, not {dtype} of {shape}")
            nbytes = path.stat().st_size - 10 - length
            if nbytes != math.prod(stored) * kind.itemsize:
                raise CetaneError(f"{path}: {nbytes} bytes do not fit {kind} of shape {stored}")
            return np.memmap(file, kind, "r", 10 + length, stored)
    except (OSError, ValueError) as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
