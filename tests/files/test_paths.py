"""A target never lies inside what is read."""

from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.files import check_outside


def test_a_target_inside_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    check_outside(tmp_path / "other", tmp_path / "bundle")
    check_outside(tmp_path / "bundle", tmp_path / "bundle")  # it is replaced as a whole
    for name in ("bundle/x", "bundle/a/b", "other/../bundle/x"):
        with pytest.raises(CetaneError, match="is inside"):
            check_outside(tmp_path / name, tmp_path / "bundle")
