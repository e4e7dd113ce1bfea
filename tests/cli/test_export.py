"""cetane export, as a user sees it."""

from pathlib import Path

import onnx
import pytest

from cetane.bundle import Bundle

from .conftest import Cetane


def test_a_bundle_and_a_package(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    found = cetane("export", ported.path, "-o", tmp_path / "all", "--to", "onnx", "--json").json
    assert set(found["files"]) == {shard.name for shard in ported.plan.shards}
    for files in found["files"].values():
        for file in files:
            onnx.checker.check_model(str(tmp_path / "all" / file))
    package = ported.shard(ported.plan.shards[0].name)
    result = cetane("export", package, "-o", tmp_path / "one", "--to", "onnx")
    assert result.code == 0 and "functions" in result.out


def test_what_is_there_stays(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = cetane("export", ported.path, "-o", tmp_path / "mine", "--to", "onnx")
    assert result.code == 2 and "exists" in result.err


@pytest.mark.parametrize("source", ["missing", "missing.mlpackage"])
def test_a_missing_source(cetane: Cetane, tmp_path: Path, source: str) -> None:
    result = cetane("export", tmp_path / source, "-o", tmp_path / "out", "--to", "onnx")
    assert result.code == 2 and len(result.err.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*tmp"))


def test_one_form(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    assert cetane("export", ported.path, "-o", tmp_path / "out").code == 2
