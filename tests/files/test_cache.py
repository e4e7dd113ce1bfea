"""Where the cache is, that an entry is whole or absent, and which entries are removed."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cetane.errors import CetaneError
from cetane.files import (
    cache_dir,
    forget_oldest,
    is_kept,
    keep_tensors,
    kept_tensors,
    read_cache,
    write_cache,
)


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
    assert path.read_text() == read_cache(path) == "two"
    hashed = path.with_name("entry.sha256")
    assert hashed.read_text() == hashlib.sha256(b"two").hexdigest()

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    write_cache(path, "three")
    assert read_cache(path) == "two" and sorted(path.parent.iterdir()) == [path, hashed]


@pytest.mark.parametrize("content", [b"", b"on", b"onE", b"one\n", b"\xff\xff\xff", None])
def test_only_what_was_written_is_read(tmp_path: Path, content: bytes | None) -> None:
    """Nor a file of an earlier version, which has no hash beside it."""
    path = tmp_path / "entry"
    for damaged in (path, path.with_name("entry.sha256")):
        write_cache(path, "one")
        assert read_cache(path) == "one"
        damaged.unlink()
        if content is not None:
            damaged.write_bytes(content)
        assert read_cache(path) is None and not is_kept(path)


def test_a_kill_between_a_file_and_its_hash(tmp_path: Path) -> None:
    write_cache(tmp_path / "entry", "one")
    (tmp_path / "entry").write_text("two")
    assert read_cache(tmp_path / "entry") is None
    write_cache(tmp_path / "entry", "two")
    assert read_cache(tmp_path / "entry") == "two"


def test_tensors_that_changed_are_not_read(tmp_path: Path) -> None:
    path, tensors = tmp_path / "tensors", {"a": torch.arange(6.0).reshape(2, 3)}
    keep_tensors(path, tensors)
    kept = kept_tensors(path)
    assert kept is not None and torch.equal(kept["a"], tensors["a"])
    for other in (torch.zeros(2, 3), torch.full((2, 3), torch.nan), tensors["a"].flatten()):
        save_file({"a": other}, path)
        assert kept_tensors(path) is None
    path.unlink()
    assert kept_tensors(path) is None


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for age in range(3):
        file = tmp_path / f"{age}.safetensors"
        file.write_bytes(b"x" * 100)
        os.utime(file, (1000 - age, 1000 - age))
    forget_oldest([tmp_path / "gone", *tmp_path.iterdir()], largest=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
