"""Templates in the cache: the same packages from them, and damage that is seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model, tiny_recipe

from cetane.lower.convert import convert_shard
from cetane.lower.lower import Lowering, files
from cetane.planner import Planner

ONE = {"layout": {"kind": "single"}, "verify": None, "prefill": None, "context": 32}


def lowering(**options: Any) -> Lowering:
    checkpoint = InMemoryCheckpoint(build_model("llama", num_hidden_layers=1))
    return Lowering(Planner(checkpoint, tiny_recipe(**ONE | options)), checkpoint)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are converted."""
    shards: list[str] = []

    def watch(planner: Any, shard: str, *others: Any) -> Any:
        shards.append(shard)
        return convert_shard(planner, shard, *others)

    monkeypatch.setattr("cetane.lower.template.convert_shard", watch)
    return shards


def content(package: Path) -> dict[Path, bytes]:
    return {path: (package / path).read_bytes() for path in files(package)}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def scribble(file: Path) -> None:
    changed = bytearray(file.read_bytes())
    changed[-100] ^= 0xFF
    file.write_bytes(changed)


def test_a_structure_is_converted_once(
    own_cache: Path, conversions: list[str], tmp_path: Path
) -> None:
    lowering().lower("model", tmp_path / "first")
    lowering().lower("model", tmp_path / "second")
    assert len(conversions) == len(list(own_cache.glob("store/results/*/*.json"))) == 1
    assert content(tmp_path / "first") == content(tmp_path / "second")
    modes = {path.stat().st_mode for path in (own_cache / "store").rglob("*") if path.is_file()}
    assert len(modes) == 1  # whoever reads a shared store's lists may read its objects
    lowering(context=64).lower("model", tmp_path / "other")
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", [cut, scribble])
def test_a_damaged_template_is_made_again(
    damage: Callable[[Path], None], own_cache: Path, conversions: list[str], tmp_path: Path
) -> None:
    lowering().lower("model", tmp_path / "first")
    (file,) = own_cache.glob("store/objects/*/*")
    damage(file)
    lowering().lower("model", tmp_path / "second")
    assert len(conversions) == 2
    assert content(tmp_path / "first") == content(tmp_path / "second")


def test_a_cache_that_cannot_be_written(
    conversions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    lowering().lower("model", tmp_path / "first")
    assert len(conversions) == 1
