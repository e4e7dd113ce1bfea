"""Where the cache is, that an entry is whole or absent, and which entries are removed."""

import os
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import cache_dir, forget_oldest, write_cache


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CETANE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("CETANE_CACHE")
    assert cache_dir() == Path("/b/cetane")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path("/c/.cache/cetane")


def test_nobody_knows_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user without an entry in passwd."""
    for name in ("CETANE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(CetaneError, match=r"knows no home folder .*set CETANE_CACHE to a folder"):
        cache_dir()
    monkeypatch.setenv("CETANE_CACHE", "/a")
    assert cache_dir() == Path("/a")


def test_write_replaces_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "entry"
    write_cache(path, "one")
    write_cache(path, "two")
    assert path.read_text() == "two"

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    write_cache(path, "three")
    assert path.read_text() == "two" and list(path.parent.iterdir()) == [path]


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for age in range(3):
        file = tmp_path / f"{age}.safetensors"
        file.write_bytes(b"x" * 100)
        os.utime(file, (1000 - age, 1000 - age))
    forget_oldest([tmp_path / "gone", *tmp_path.iterdir()], largest=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
