"""Errors of disks, told in one way."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from cetane.errors import CetaneError
from cetane.files import check_space, check_writable, disk_errors, make_folder_of


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_who_cannot_write_the_cache_reads_how_to_move_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user never named that folder, so the path alone tells nothing."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    for place, told in ((tmp_path / "cache" / "fitted", True), (tmp_path / "out", False)):
        with pytest.raises(CetaneError) as raised, disk_errors(place):
            raise OSError(number, "refused")
        assert raised.value.hint and ("set CETANE_CACHE" in raised.value.hint) == told


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), disk_errors(Path("out")):
        raise KeyError("x")


@pytest.mark.parametrize(
    ("needed", "free", "told"),
    [
        (400_000, 300_000, "1 MB are needed, but only 0 MB are free"),
        (7_200_000_000, 7_199_999_999, "7,200 MB are needed, but only 7,199 MB are free"),
    ],
)
def test_a_disk_with_too_little_space(
    needed: int, free: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    check_space(tmp_path, free)
    with pytest.raises(CetaneError, match=rf": {told} \("):
        check_space(tmp_path, needed)


def test_a_check_leaves_no_folder(tmp_path: Path) -> None:
    """What is to be written may be refused before there is anything to write."""
    page, under_a_file = tmp_path / "a/b/page.html", tmp_path / "file/a/page.html"
    check_writable(page)
    assert not list(tmp_path.iterdir())
    make_folder_of(page)
    assert page.parent.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(CetaneError, match="Not a directory"):
        check_writable(under_a_file)
