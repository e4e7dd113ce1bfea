"""A small build: undisturbed, stopped, and without packages."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.converting import converted_once
from tests.pipeline.builds import PARTS, Stop, stop_at

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.lower.lower import Lowering
from cetane.pipeline.build import build
from cetane.pipeline.partial import Partial
from cetane.schema.recipe import Recipe


@pytest.fixture(scope="session")
def small_options() -> dict[str, Any]:
    """The smallest build of several shards."""
    return {"verify": None, "prefill": None, "layout": {"kind": "per-block"}, "context": 32}


@pytest.fixture(scope="session")
def small(recipe: Callable[..., Recipe], small_options: dict[str, Any]) -> Recipe:
    """Its recipe."""
    return recipe(**small_options)


@pytest.fixture(scope="session")
def undisturbed(tiny_bundle: Callable[..., Bundle], small_options: dict[str, Any]) -> Bundle:
    """What comes of it if nothing stops it."""
    with converted_once():
        return tiny_bundle(**small_options)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As `lowered`, but packages are empty."""
    names: list[str] = []

    def write(self: Lowering, shard: str, target: Path) -> None:
        names.append(shard)
        target.mkdir()
        (target / "Manifest.json").write_text(shard)

    monkeypatch.setattr(Lowering, "lower", write)
    return names


@pytest.fixture
def stopped(
    undisturbed: Bundle, tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe
) -> Path:
    """A place where a build was stopped after its last shard, without lowering again."""
    target = tmp_path / "out"
    with pytest.raises(Stop):
        build(tiny_checkpoint, small, target, stop_at("tokenizer"))
    partial = tmp_path / "out.partial"
    shutil.rmtree(partial / "bundle")
    shutil.copytree(undisturbed.path, partial / "bundle")
    (partial / "bundle/manifest.json").unlink()
    made = Partial(target)
    for name in PARTS:
        made.record(name)
    return target
