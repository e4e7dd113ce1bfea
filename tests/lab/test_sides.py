"""The sides of an experiment: their recipes."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.checkpoint import open_checkpoint
from cetane.compress.recipe_file import TextFile
from cetane.files import claimed, write_toml
from cetane.lab.experiment import Experiment
from cetane.lab.sides import Side, Sides, with_context
from cetane.lab.workload import Setting
from cetane.schema.recipe import load_recipe


def test_files_beside_a_recipe_are_found_for_another_context_and_fewer_tokens(
    tmp_path: Path, tiny_checkpoint_folder: Path
) -> None:
    """The recipe file's folder is not the current one."""
    (tmp_path / "ours.txt").write_text("a fuel ignites. " * 99, encoding="utf-8")
    named = TextFile.of(tmp_path / "ours.txt").model_dump()
    compression = {"default": "palette4-kmeans-group8", "method": "gptq", "text": named}
    write_toml(tmp_path / "ours.toml", {"compression": compression})
    recipe = with_context(load_recipe(str(tmp_path / "ours.toml")), 64)
    assert recipe.cache.context == 64 and recipe.compression.text is not None
    assert recipe.compression.text.path == tmp_path / "ours.txt"

    side: Any = Side.__new__(Side)
    side.arm = SimpleNamespace(subset=300)
    setting = SimpleNamespace(text=lambda _: tmp_path / "ours.txt")
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    side.workload = SimpleNamespace(checkpoint=checkpoint, setting=setting, spec=None)
    narrowed = side.narrowed(recipe)
    assert narrowed.head.subset is not None and narrowed.compression.text is not None
    assert narrowed.compression.text.path == tmp_path / "ours.txt"


def test_a_bundle_that_another_experiment_builds_is_waited_for(
    tiny: Experiment, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    side = Sides(tiny, setting, lambda what, *_: seen.append(what)).baseline
    target = setting.folder / "bundles" / f"{side.recipe.name}-{side.key[:16]}"
    with ExitStack() as other:
        other.enter_context(claimed(target, "building"))
        monkeypatch.setattr("cetane.lab.sides.time.sleep", lambda _: other.close())
        assert side.bundle.path == target
    assert seen[0] == f"waiting for {target.name}" and seen.count(seen[0]) == 1
