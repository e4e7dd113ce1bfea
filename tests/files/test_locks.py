"""What can be claimed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import claimed, replacing
from cetane.files.locks import holder, is_claimed


@pytest.mark.parametrize("target", ["/proc/x", "/dev/null/x"])
def test_where_no_file_can_be_made_nobody_writes(target: str) -> None:
    with pytest.raises(CetaneError, match=f"cannot write {target}: "), claimed(Path(target), "x"):
        pass


@pytest.mark.parametrize("target", [".", "", "..", "/", "a/.."])
def test_what_has_no_name_cannot_be_claimed(target: str) -> None:
    """Its lock would be `..lock`, or none."""
    with pytest.raises(CetaneError, match="does not end with a name"), claimed(Path(target), "x"):
        pass


def test_a_second_writer_is_told_who_writes_and_what_to_do(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with claimed(target, "porting"):
        for advice, hint in (((), "choose another folder"), (("wait for it",), "wait for it")):
            with pytest.raises(CetaneError) as refused, claimed(target, "porting", *advice):
                pass
            assert f"is being written by process {os.getpid()} on " in refused.value.message
            assert refused.value.hint is not None and hint in refused.value.hint


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Such a folder may have gigabytes. What others write beside it stays."""
    killed = """
import os, signal, sys
from pathlib import Path
from cetane.files import claimed, replacing
from cetane.files.locks import holder, is_claimed
target = Path(sys.argv[1])
with claimed(target, "exporting"), replacing(target) as folder:
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = tmp_path / "[x].y"
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", killed, str(target)]).returncode == -9
        (left,) = tmp_path.glob(".*.tmp")
        assert (left / "weights").is_file()
    others = [
        ".[x].y.zip.123.tmp",
        ".[x].123.tmp",
        ".[x].y.part.tmp",
        ".x.y.123.tmp",
        "[x].y.1.tmp",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    with claimed(target, "exporting"), replacing(target) as folder:
        folder.write_bytes(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {target.name, *others}


@pytest.mark.parametrize("content", ["[" * 900, "[]", '{"process": 1}', "\0" * 2_000_000])
def test_a_holder_that_says_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    assert holder(path) == "another process"


def test_a_holder_whose_file_is_a_pipe(tmp_path: Path) -> None:
    """Reading it would wait for a writer."""
    os.mkfifo(tmp_path / "lock")
    assert holder(tmp_path / "lock") == "another process"


def test_a_lock_that_is_a_pipe(tmp_path: Path) -> None:
    """`cetane gc` and `cetane doctor` waited for a writer of it."""
    os.mkfifo(tmp_path / ".x.lock")
    assert is_claimed(tmp_path / "x")


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    """The error named the target, and too many levels of links."""
    (tmp_path / ".x.lock").symlink_to(tmp_path / "other")
    why = r"cannot write .*/\.x\.lock: it is a link"
    with pytest.raises(CetaneError, match=why), claimed(tmp_path / "x", "porting"):
        pass
    assert not (tmp_path / "other").exists()
