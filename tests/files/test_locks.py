"""What can be claimed."""

from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import claimed


@pytest.mark.parametrize("target", [".", "", "..", "/", "a/.."])
def test_what_has_no_name_cannot_be_claimed(target: str) -> None:
    """Its lock would be `..lock`, or none."""
    with pytest.raises(CetaneError, match="does not end with a name"), claimed(Path(target), "x"):
        pass
