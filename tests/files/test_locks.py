"""What can be claimed."""

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
