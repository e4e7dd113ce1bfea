"""Where numba keeps compiled functions."""

import os
from pathlib import Path

import numba
import pytest

from cetane.files import KERNELS, KERNELS_OF, code_sha256, place_kernels


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
