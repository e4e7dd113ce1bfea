"""Builds whose parts are made by workers, or come from a store."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.builds import PARTS, silent
from tests.tasks.work import Inline

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.files import records
from cetane.pipeline import compression_choice
from cetane.pipeline.build import build
from cetane.pipeline.parts import job_of, make_part, opened
from cetane.pipeline.stored_bundles import bundle_key
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe
from cetane.store.settings import using
from cetane.store.store import Store, result_path

pytestmark = pytest.mark.usefixtures("shared_templates")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker's build of another test is taken up."""
    opened.cache_clear()
    monkeypatch.chdir(tmp_path)


def test_workers_make_the_same_bundle(
    tiny_checkpoint_folder: Path, small: Recipe, undisturbed: Bundle, tmp_path: Path, alone: None
) -> None:
    workers, seen = Inline(), list[tuple[str, int, int]]()
    made = build(
        open_checkpoint(tiny_checkpoint_folder), small, tmp_path / "out",
        lambda *step: seen.append(step), workers=workers,
    )  # fmt: skip
    assert made.digest == undisturbed.digest
    made.verify()
    assert workers.performed == PARTS
    assert list(dict.fromkeys(step[0] for step in seen if step[0] in PARTS)) == PARTS
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_second_checkout_builds_nothing(
    tiny_checkpoint_folder: Path, small: Recipe, undisturbed: Bundle, tmp_path: Path, alone: None,
    lowered: list[str],
) -> None:  # fmt: skip
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    with using(str(tmp_path / "store")):
        build(checkpoint, small, tmp_path / "first", silent)
        count = len(lowered)
        assert build(checkpoint, small, tmp_path / "second", silent).digest == undisturbed.digest
        assert len(lowered) == count
        build(checkpoint, small, tmp_path / "third", silent, rebuild=True)
        assert len(lowered) == 2 * count


FETCH = """
import sys
from pathlib import Path
from cetane.checkpoint import open_checkpoint
from cetane.files import silent
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe
recipe = Recipe.model_validate_json(sys.argv[2])
build(open_checkpoint(sys.argv[1]), recipe, Path("fetched"), silent)
print(sorted({"torch", "transformers", "coremltools", "numba"} & set(sys.modules)))
"""


def test_a_whole_bundle_comes_without_a_plan(
    tiny_checkpoint_folder: Path, small: Recipe, undisturbed: Bundle, tmp_path: Path, alone: None
) -> None:
    """From another checkout, by a process that loads no torch; it notes its own checkpoint."""
    with using(str(tmp_path / "store")):
        build(open_checkpoint(tiny_checkpoint_folder), small, tmp_path / "first", silent)
    folder = shutil.copytree(
        tiny_checkpoint_folder, tmp_path / "elsewhere" / tiny_checkpoint_folder.name
    )
    os.utime(folder / "model.safetensors", (1, 1))
    done = subprocess.run(
        [sys.executable, "-c", FETCH, folder, small.model_dump_json()],
        env=os.environ | {"CETANE_STORE": str(tmp_path / "store")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
    fetched, opened = Bundle(tmp_path / "fetched"), open_checkpoint(folder)
    fetched.verify()
    assert fetched.manifest.files == undisturbed.manifest.files
    assert fetched.manifest.plan == undisturbed.plan
    assert fetched.manifest.source == str(folder)
    assert fetched.manifest.fingerprint == opened.fingerprint
    assert opened.fingerprint != undisturbed.manifest.fingerprint
    stored = [path.read_text() for path in (tmp_path / "store").glob("objects/*/*")
              if path.stat().st_size < 10**6 and path.read_bytes().startswith(b"{")]  # fmt: skip
    assert not any(str(tiny_checkpoint_folder) in text for text in stored)


def test_what_a_recipe_left_open_is_not_chosen_again(
    tiny_checkpoint_folder: Path, small: Recipe, tmp_path: Path, alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    open_recipe = override(small, {"compression.default": "auto"})
    chosen = override(small, {"compression.default": "int8-per-channel"})
    with using(str(tmp_path / "store")):
        monkeypatch.setattr(compression_choice, "resolve_recipe", lambda *_: chosen)
        first = build(checkpoint, open_recipe, tmp_path / "first", silent)
        monkeypatch.setattr(compression_choice, "resolve_recipe", None)
        second = build(checkpoint, open_recipe, tmp_path / "second", silent)
    assert first.digest == second.digest
    assert second.plan.recipe == chosen


@pytest.mark.parametrize("change", [{"files": {}}, {"schema_version": 99}, {"plan": {}}])
def test_a_whole_bundle_with_a_wrong_manifest(
    change: dict[str, Any], tiny_checkpoint_folder: Path, small: Recipe, undisturbed: Bundle,
    tmp_path: Path, alone: None, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It has the right hash, since its publisher named it. It is refused and made again."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    store, key = Store(tmp_path / "store"), bundle_key(checkpoint, small)
    with using(store.url):
        build(checkpoint, small, tmp_path / "first", silent)
        (tmp_path / "store" / result_path(key)).unlink()
        wrong = shutil.copytree(tmp_path / "first", tmp_path / "wrong")
        manifest = json.loads((wrong / "manifest.json").read_text()) | change
        (wrong / "manifest.json").write_text(json.dumps(manifest))
        store.publish(key, wrong, records(wrong, wrong))
        assert build(checkpoint, small, tmp_path / "second", silent).digest == undisturbed.digest
        assert "refused, and made again" in caplog.text
        assert store.find(key) is not None


@pytest.mark.parametrize("workers", [None, Inline()])
def test_a_tampered_part_is_made_again(
    tiny_checkpoint_folder: Path, small: Recipe, undisturbed: Bundle, tmp_path: Path, alone: None,
    workers: Inline | None, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    with using(str(tmp_path / "store")):
        build(checkpoint, small, tmp_path / "first", silent)
        largest = max((tmp_path / "store").glob("objects/*/*"), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-1] ^= 1
        largest.unlink()
        largest.write_bytes(content)
        made = build(checkpoint, small, tmp_path / "second", silent, workers=workers)
    assert made.digest == undisturbed.digest
    assert "refused, and made again" in caplog.text
    made.verify()


def test_another_checkpoint_where_a_worker_looks(
    tiny_checkpoint_folder: Path, small: Recipe, tmp_path: Path, alone: None
) -> None:
    folder = shutil.copytree(tiny_checkpoint_folder, tmp_path / "model")
    job = job_of(open_checkpoint(folder), small)
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(CetaneError, match="not the files here that the work was begun with"):
        make_part(job, "recipe.toml", tmp_path / "part")
