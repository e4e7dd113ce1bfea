"""Inputs that a function takes, made up or read from a file that may be anything."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from cetane.errors import CetaneError
from cetane.mil import MilFunction, load
from cetane.mil.executor import Executable
from cetane.mil.inputs import random_inputs, read_inputs

X, N = np.ones((2, 3), np.float32), np.array([1], np.int32)


@pytest.fixture(scope="module")
def function(build: Callable[..., Path]) -> MilFunction:
    path = build(
        {"x": ((2, 3), "fp16"), "n": ((1,), "int32")},
        lambda x, n: mb.gather(x=x, indices=n, axis=0, name="y"),
    )
    return load(path).functions["main"]


def test_random_inputs_are_taken(function: MilFunction) -> None:
    inputs = random_inputs(function)
    assert {name: (a.shape, a.dtype) for name, a in inputs.items()} == {
        "x": ((2, 3), np.float16),
        "n": ((1,), np.int32),
    }
    assert inputs["n"] in (0, 1)
    assert Executable(function)(inputs)["y"].shape == (1, 3)
    again = random_inputs(function)
    assert all(np.array_equal(inputs[name], again[name]) for name in inputs)


def test_inputs_of_a_file(function: MilFunction, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(X * 7), n=N)
    inputs = read_inputs(tmp_path / "a.npz", function)
    assert (inputs["x"] == 7).all()
    assert Executable(function)(inputs)["y"].tolist() == [[7, 7, 7]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "has the arrays x; function main takes n, x"),
        ({"x": X, "n": N, "m": N}, "has the arrays m, n, x"),
        ({"x": X.T, "n": N}, r"x is float32 of shape \(3, 2\), the function takes fp16 \(2, 3\)"),
        ({"x": X.astype(int), "n": N}, "x is int64"),
        ({"x": X, "n": N.astype(float)}, "n is float64"),
        ({"x": np.array([[None] * 3] * 2), "n": N}, "not an array of numbers"),
    ],
)
def test_arrays_that_do_not_fit(
    function: MilFunction, tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CetaneError, match=message):
        read_inputs(tmp_path / "a.npz", function)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def scribble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[150:170] = b"\xff" * 20
    file.write_bytes(bytes(content))


def garble(file: Path) -> None:
    """What is compressed no longer unpacks."""
    np.savez_compressed(file, x=X, n=N)
    content = bytearray(file.read_bytes())
    content[60:90] = b"\xff" * 30
    file.write_bytes(bytes(content))


def garble_lzma(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", bytes(1000))
        archive.writestr("n.npy", bytes(1000))
    content = bytearray(file.read_bytes())
    content[45:60] = b"\xff" * 15
    file.write_bytes(bytes(content))


def twice(file: Path) -> None:
    """numpy and others may take either."""
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("x", archive.read("x.npy"))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def text(file: Path) -> None:
    file.write_text("no archive")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path) -> None:
    file.unlink()


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def raw(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"short")
        archive.writestr("n.npy", b"\x93NUMPY\x09\x09")


def huge(file: Path) -> None:
    """The header says what fits, the data is not there."""
    with zipfile.ZipFile(file) as archive:
        x, n = archive.read("x.npy"), archive.read("n.npy")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", x[:-4])
        archive.writestr("n.npy", n)


DAMAGES = [
    cut, scribble, garble, garble_lzma, twice, pipe, endless,
    text, empty, remove, folder, raw, huge,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(
    function: MilFunction, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=X, n=N)
    damage(file)
    with pytest.raises(CetaneError, match=r"a\.npz: not a readable .npz of arrays"):
        read_inputs(file, function)
