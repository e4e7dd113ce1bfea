"""Where the cache is, that an entry is whole or absent; what errors and targets may be."""

import errno
import os
from pathlib import Path

import numba
import pytest
from safetensors import SafetensorError

from cetane.errors import LONGEST, CetaneError
from cetane.files import (
    KERNELS,
    KERNELS_OF,
    cache_dir,
    check_outside,
    claimed,
    code_sha256,
    disk_errors,
    forget_oldest,
    place_kernels,
    write_cache,
)


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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of some code, whose kernels have no folder yet."""
    (tmp_path / "package/mil/fast").mkdir(parents=True)
    (tmp_path / "package/mil/fast/code.py").write_text("")
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(KERNELS, "")  # so that it is put back
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    code_sha256.cache_clear()
    return tmp_path / "package"


def test_kernels_lie_in_the_package_by_its_code(package: Path) -> None:
    (package / f"__pycache__/{KERNELS_OF}of-other-code").mkdir(parents=True)
    place_kernels(package)
    folder = Path(os.environ[KERNELS])
    assert list((package / "__pycache__").iterdir()) == [folder]
    assert str(folder) == numba.config.CACHE_DIR


@pytest.mark.parametrize("home", [True, False])
def test_kernels_of_a_package_that_is_read_only(
    package: Path, monkeypatch: pytest.MonkeyPatch, home: bool
) -> None:
    """They are kept in the cache folder, or for this process: numba compiles nothing otherwise."""
    if not home:
        (package.parent / "cache").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    place_kernels(package)
    folder = Path(os.environ[KERNELS])
    assert folder.is_dir() and folder.is_relative_to(package.parent / "cache/kernels") is home
    assert str(folder) == numba.config.CACHE_DIR
    place_kernels(package)  # as a child process does, which has the same code
    assert Path(os.environ[KERNELS]) == folder


def test_a_child_process_takes_no_kernels_of_other_code(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it takes a folder that the user named."""
    monkeypatch.setenv(KERNELS, str(package / f"{KERNELS_OF}of-other-code"))
    place_kernels(package)
    assert Path(os.environ[KERNELS]).parent == package / "__pycache__"
    monkeypatch.setenv(KERNELS, str(package / "own"))
    place_kernels(package)
    assert Path(os.environ[KERNELS]) == package / "own"


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk full while writing"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "disk full"),
        (SafetensorError("I/O error: Input/output error (os error 5)"), "cannot write .*: Input"),
        (RuntimeError("[MIL FileWriter] failed"), "disk full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot write .*: Permission denied"),
        (CetaneError("No space left on device, said a model"), "said a model"),
    ],
)
def test_errors_of_a_disk_are_told_in_one_way(error: Exception, message: str) -> None:
    with pytest.raises(CetaneError, match=message), disk_errors(Path("out")):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), disk_errors(Path("out")):
        raise KeyError("x")


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for age in range(3):
        file = tmp_path / f"{age}.safetensors"
        file.write_bytes(b"x" * 100)
        os.utime(file, (1000 - age, 1000 - age))
    forget_oldest([tmp_path / "gone", *tmp_path.iterdir()], largest=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]


@pytest.mark.parametrize("target", [".", "", "..", "/", "a/.."])
def test_what_has_no_name_cannot_be_claimed(target: str) -> None:
    """Its lock would be `..lock`, or none."""
    with pytest.raises(CetaneError, match="does not end with a name"), claimed(Path(target), "x"):
        pass
