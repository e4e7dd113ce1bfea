"""Hashes of files, against hashlib, and of files with holes."""

import hashlib
import os
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import hashes, sha256


def sparse(path: Path, size: int, data: dict[int, bytes]) -> Path:
    """A file of `size` bytes with some data, by its offset, and holes."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, content in data.items():
            file.seek(offset)
            file.write(content)
    return path


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    """It takes no room on a disk. The hash of a bundle's weight file took hours."""
    path = sparse(tmp_path / "weight.bin", 1 << 42, {0: b"x", 1 << 41: b"y"})
    with pytest.raises(CetaneError, match="has 4,398,046,511,104 bytes, and most of them were"):
        sha256(path)


PIECE = 1 << 16


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        ({0: 4 * PIECE}, True),
        ({0: PIECE, 5 * PIECE: 3 * PIECE}, True),
        ({PIECE: 3 * PIECE}, False),
        ({}, False),
    ],
)
def test_half_of_a_large_file_must_be_there(
    data: dict[int, int], whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "MOST_SPARSE", 1000)
    content = {offset: b"x" * size for offset, size in data.items()}
    path = sparse(tmp_path / "file", 8 * PIECE, content)
    if whole:
        assert sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        with pytest.raises(CetaneError, match="never written"):
            sha256(path)


def test_a_disk_that_tells_of_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "MOST_SPARSE", 1000)
    path = sparse(tmp_path / "file", 1 << 20, {})

    def untold(handle: int, offset: int, whence: int) -> int:
        if whence == os.SEEK_DATA:
            raise OSError(22, "Invalid argument")
        return seek(handle, offset, whence)

    seek = os.lseek
    monkeypatch.setattr(os, "lseek", untold)
    assert sha256(path) == hashlib.sha256(bytes(1 << 20)).hexdigest()
