"""What can be claimed."""

import os
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import claimed


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
