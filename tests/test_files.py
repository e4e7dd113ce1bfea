"""Where the cache is, that an entry is whole or absent; what errors and targets may be."""

from pathlib import Path

import pytest

from cetane.errors import LONGEST, CetaneError
from cetane.files import cache_dir, check_outside, write_cache


def test_messages_are_printable_and_short() -> None:
    for text in ("\x1b" * 1000, "a\n\tb" * 500, "\ud800" * 299, "x" * 10**6):
        line = CetaneError(text).message
        assert line.isprintable() and 0 < len(line) <= LONGEST


def test_a_target_inside_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    check_outside(tmp_path / "other", tmp_path / "bundle")
    check_outside(tmp_path / "bundle", tmp_path / "bundle")  # it is replaced as a whole
    for name in ("bundle/x", "bundle/a/b", "other/../bundle/x"):
        with pytest.raises(CetaneError, match="is inside"):
            check_outside(tmp_path / name, tmp_path / "bundle")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CETANE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("CETANE_CACHE")
    assert cache_dir() == Path("/b/cetane")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path("/c/.cache/cetane")


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
