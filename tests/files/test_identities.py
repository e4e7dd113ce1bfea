"""A file's identity by its content, beside hashlib."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from cetane.files import content_identity, file_identity


def test_another_content_is_noticed_under_the_old_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp -p` writes over a file: its size, date and inode stay."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    path, seen = tmp_path / "weights", []
    for content in (b"one", b"two"):
        if seen:
            time.sleep(0.02)  # the clock of file systems is coarse
        path.write_bytes(content)
        os.utime(path, (0, 0))
        seen.append((file_identity(path), path.stat().st_ino))
        for _ in range(2):  # hashed, then known
            assert content_identity(path) == f"weights {hashlib.sha256(content).hexdigest()}\n"
    assert seen[0] == seen[1]


def test_a_file_that_stays_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    path, hashed = tmp_path / "weights", []

    def sha256(of: Path) -> str:
        hashed.append(of)
        return hashlib.sha256(of.read_bytes()).hexdigest()

    monkeypatch.setattr("cetane.files.identities.sha256", sha256)
    path.write_bytes(b"one")
    assert content_identity(path) == content_identity(path)
    assert hashed == [path]
