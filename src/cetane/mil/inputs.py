"""Inputs for a function: random, or read from a file."""

import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np

from cetane.errors import CetaneError
from cetane.files import open_regular
from cetane.mil.dtypes import NUMPY, Array, kind
from cetane.mil.program import MilFunction, TensorType, listed
from cetane.mil.shapes import bounded
from cetane.npy import Header, read_data, read_header

DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""Errors that a damaged archive raises."""


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
        with open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
            names = {name.removesuffix(".npy"): name for name in archive.namelist()}
            if len(names) < len(archive.namelist()):
                raise ValueError("two of them have one name")
            if names.keys() != function.inputs.keys():
                raise CetaneError(
                    f"{path}: has the arrays {listed(names)}; function {function.name} takes "
                    f"{listed(function.inputs)}"
                )
            arrays = {}
            for name, type_ in function.inputs.items():
                with archive.open(names[name]) as file:
                    header = read_header(file)
                    check_fit(path, name, header, type_)
                    arrays[name] = read_data(file, header)
            return arrays
    except DAMAGED as error:
        raise CetaneError(f"{path}: not a readable .npz of arrays: {error}") from error


def check_fit(path: Path, name: str, header: Header, type_: TensorType) -> None:
    """Raise CetaneError if an array does not fit the function's input; ValueError if it is too
    large to read."""
    bounded(header.shape)
    if not type_.accepts_array(header.dtype, header.shape):
        raise CetaneError(f"{path}: {name} is {header}, the function takes {type_}")
