"""Paths that stay inside a folder, and targets that stay outside."""

from pathlib import Path

import pytest

import cetane
from cetane.errors import CetaneError
from cetane.files import check_outside, inside, is_file


def test_a_target_inside_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    check_outside(tmp_path / "other", tmp_path / "bundle")
    check_outside(tmp_path / "bundle", tmp_path / "bundle")  # it is replaced as a whole
    for name in ("bundle/x", "bundle/a/b", "other/../bundle/x"):
        with pytest.raises(CetaneError, match="is inside"):
            check_outside(tmp_path / name, tmp_path / "bundle")


@pytest.mark.parametrize("to", ["loop", "file", "/nowhere"])
def test_a_link_inside_a_folder(tmp_path: Path, to: str) -> None:
    """Also one that leads to itself, for which Python 3.11 raises no OSError."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(to)
    with pytest.raises(
        CetaneError, match="outside the bundle" if to == "/nowhere" else "is a link"
    ):
        inside(tmp_path, "loop")


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert is_file(tmp_path / "a") and not is_file(tmp_path) and not is_file(tmp_path / "b")
    for read in (is_file, cetane.load, cetane.plan):
        with pytest.raises(CetaneError, match=r"cannot look at a{200}: File name too long"):
            read(Path("a" * 5000))
