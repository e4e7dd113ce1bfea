"""Inputs for a function: random, or read from a file."""

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array, kind
from cetane.mil.program import MilFunction, TensorType, listed

DAMAGED = (
    OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError
)  # fmt: skip
"""Errors that zipfile and numpy raise for a damaged file. numpy parses an array's header as
Python."""


def random_inputs(function: MilFunction, seed: int = 0) -> dict[str, Array]:
    """Standard normal floats; integers and booleans of 0 or 1, which most ops accept as an index.

    A flexible input gets the package's default shape, else the smallest.
    """
    random = np.random.default_rng(seed)
    return {name: _random(type_, random) for name, type_ in function.inputs.items()}


def _random(type_: TensorType, random: np.random.Generator) -> Array:
    shape = type_.default or tuple(
        size if isinstance(size, int) else max(size.lower, 1) for size in type_.shape
    )
    if kind(np.dtype(NUMPY[type_.dtype])) == "float":
        return random.standard_normal(shape).astype(NUMPY[type_.dtype])
    return random.integers(0, 2, shape).astype(NUMPY[type_.dtype])


def read_inputs(path: Path, function: MilFunction) -> dict[str, Array]:
    """The inputs of a function from an .npz, which has an array for each input name.

    Raises CetaneError for another file, and for names, shapes or dtypes that do not fit the
    function. An array is read only after its header fits.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy"): name for name in archive.namelist()}
            if names.keys() != function.inputs.keys():
                raise CetaneError(
                    f"{path}: has the arrays {listed(names)}; function {function.name} takes "
                    f"{listed(function.inputs)}"
                )
            arrays = {}
            for name, type_ in function.inputs.items():
                with archive.open(names[name]) as file:
                    _check(path, name, file, type_)
                with archive.open(names[name]) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
            return arrays
    except DAMAGED as error:
        raise CetaneError(f"{path}: not a readable .npz of arrays: {error}") from error


def _check(path: Path, name: str, file: IO[bytes], type_: TensorType) -> None:
    """Raise CetaneError if an array's header does not fit the function's input."""
    version = np.lib.format.read_magic(file)
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"{name} has the unknown format version {version}")
    shape, _, dtype = readers[version](file)
    if not type_.accepts(shape) or kind(dtype) != kind(np.dtype(NUMPY[type_.dtype])):
        raise CetaneError(f"{path}: {name} is {dtype} {shape}, the function takes {type_}")
