"""A build goes on where it was stopped, and ends as if it never had been."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pipeline.builds import STEPS, Stop, assert_same, silent, stop_at

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.lower.lower import Lowering
from cetane.pipeline.assembly import build_key
from cetane.pipeline.build import build
from cetane.pipeline.partial import Partial
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe

pytestmark = pytest.mark.usefixtures("shared_templates")


def test_progress(
    stopped: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    lowered: list[str],
) -> None:
    seen: list[tuple[str, int, int]] = []
    bundle = build(tiny_checkpoint, small, stopped, lambda *call: seen.append(call))
    assert seen == [(name, index, 7) for index, name in enumerate(STEPS)]
    assert lowered == []
    assert_same(bundle, undisturbed)


def test_a_build_that_goes_on_says_so(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, lowered: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And what was made; the first build and one that makes all say nothing."""
    target = tmp_path / "out"
    caplog.set_level("INFO", "cetane")
    with pytest.raises(Stop):
        build(tiny_checkpoint, small, target, stop_at("rotary-default.npy"))
    for rebuild in (True, False):
        with pytest.raises(Stop):
            build(tiny_checkpoint, small, target, stop_at("rotary-default.npy"), rebuild=rebuild)
    (told,) = caplog.messages
    left = f"an earlier build left 3 of 7 parts in {target}.partial"
    assert told == f"{left}: this one makes the rest"


def test_stopped_after_every_part(
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    lowered: list[str],
) -> None:
    target = tmp_path / "out"
    for step in STEPS:
        with pytest.raises(Stop):
            build(tiny_checkpoint, small, target, stop_at(step))
        assert not target.exists()
        with pytest.raises(CetaneError):
            Bundle(target)
    assert_same(build(tiny_checkpoint, small, target, silent), undisturbed)
    assert lowered == ["layer-00", "head-0", "layer-01"]


@pytest.mark.parametrize("shard", ["layer-00", "head-0"])
def test_stopped_while_a_shard_is_made(
    shard: str,
    tmp_path: Path,
    stopped: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.rmtree(tmp_path / f"out.partial/bundle/shards/{shard}.mlpackage")

    def die(self: Lowering, name: str, target: Path) -> None:
        target.mkdir()
        (target / "Manifest.json").write_text("{")
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Lowering, "lower", die)
        # What a kill leaves behind, which a Python exception would clean up.
        patch.setattr("shutil.rmtree", silent)
        build(tiny_checkpoint, small, stopped, silent)
    assert any(path.name.startswith(".") for path in tmp_path.rglob("*"))
    assert_same(build(tiny_checkpoint, small, stopped, silent), undisturbed)


SCRIPT = """
import sys
from pathlib import Path
from cetane.pipeline.build import build
from cetane.checkpoint import open_checkpoint
from cetane.schema.recipe import Recipe
from cetane.store.settings import using
folder, target, recipe = sys.argv[1:]
checkpoint, recipe = open_checkpoint(folder), Recipe.model_validate_json(recipe)
build(checkpoint, recipe, Path(target), lambda *call: print(*call, flush=True))
"""


def test_killed_at_random_times(
    tmp_path: Path,
    tiny_checkpoint_folder: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
) -> None:
    target = tmp_path / "made/out"
    target.parent.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(tiny_checkpoint_folder), str(target),
               small.model_dump_json()]  # fmt: skip
    draw = random.Random(1)
    apart = os.environ | {"CETANE_CACHE": str(tmp_path / "cache")}  # where nothing is made yet
    for _ in range(2):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=apart
        )
        assert process.stdout is not None
        assert any(line.startswith(b"embedding.npy") for line in process.stdout)
        time.sleep(draw.uniform(0, 2))
        process.kill()
        process.wait()
        process.stdout.close()
    assert (tmp_path / "made/out.partial").exists() or target.exists()
    assert_same(build(tiny_checkpoint, small, target, silent), undisturbed)


def test_another_recipe_starts_anew(
    stopped: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    lowered: list[str],
) -> None:
    other = small.model_copy(update={"name": "other"})
    bundle = build(tiny_checkpoint, other, stopped, silent)
    bundle.verify()
    assert lowered == ["layer-00", "head-0", "layer-01"]
    assert bundle.plan.recipe == other


def test_another_checkpoint_starts_anew(
    stopped: Path, small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path, lowered: list[str]
) -> None:
    folder = shutil.copytree(tiny_checkpoint_folder, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, folder / "model.safetensors")
    with pytest.raises(Stop):
        build(open_checkpoint(folder), small, stopped, stop_at("shards/head-0.mlpackage"))
    assert lowered == ["layer-00"]


@pytest.mark.parametrize("damage", ["changed", "missing", "file missing", "file added"])
def test_a_finished_part_that_was_damaged_is_made_again(
    damage: str,
    stopped: Path,
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    lowered: list[str],
) -> None:
    package = tmp_path / "out.partial/bundle/shards/layer-01.mlpackage"
    weights = package / "Data/com.apple.CoreML/weights/weight.bin"
    if damage == "changed":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        shutil.rmtree(package)
    elif damage == "file missing":
        weights.unlink()
    else:
        (package / "more").touch()
    bundle = build(tiny_checkpoint, small, stopped, silent)
    assert lowered == ["layer-01"]
    assert_same(bundle, undisturbed)


def test_a_finished_bundle_is_kept(
    undisturbed: Bundle, tiny_checkpoint: Checkpoint, small: Recipe, lowered: list[str]
) -> None:
    leftover = undisturbed.path.with_name(undisturbed.path.name + ".partial")
    (leftover / "done").mkdir(parents=True)
    assert build(tiny_checkpoint, small, undisturbed.path, silent).digest == undisturbed.digest
    assert lowered == []
    assert not leftover.exists()


def test_a_finished_bundle_that_was_damaged_is_refused(
    undisturbed: Bundle, tiny_checkpoint: Checkpoint, small: Recipe, tmp_path: Path
) -> None:
    target = shutil.copytree(undisturbed.path, tmp_path / "out")
    (target / "tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(CetaneError, match=r"tokenizer/tokenizer\.json"):
        build(tiny_checkpoint, small, target, silent)


def test_another_bundle_is_replaced_only_by_force(
    undisturbed: Bundle,
    stopped: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    recipe: Callable[..., Recipe],
    small_options: dict[str, Any],
    tmp_path: Path,
) -> None:
    shutil.copytree(undisturbed.path, stopped)
    before = Bundle(stopped).digest
    # another recipe's build was interrupted: to find this bundle whole must not undo its work
    left = Partial(stopped)
    left.start("another build")
    assert build(tiny_checkpoint, small, stopped, silent).digest == before
    assert left.key.is_file()
    left.start(build_key(tiny_checkpoint, Bundle(stopped).plan.recipe))
    build(tiny_checkpoint, small, stopped, silent)
    assert not left.root.exists()
    with pytest.raises(CetaneError, match="another checkpoint or recipe") as refused:
        build(tiny_checkpoint, recipe(**small_options | {"context": 64}), stopped, silent)
    assert refused.value.hint == "--force replaces it"
    assert Bundle(stopped).digest == before

    (stopped / "gates").mkdir()
    (stopped / "gates/golden.json").write_text("{}")
    assert_same(build(tiny_checkpoint, small, stopped, silent, force=True), undisturbed)
    assert not (stopped / "gates").exists()


def test_a_bundle_that_is_built_again_keeps_its_draft_heads(
    tiny_checkpoint: Checkpoint, small: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They took long to train. A bundle of another recipe has other hidden states."""
    target = tmp_path / "bundle"
    build(tiny_checkpoint, small, target, silent)
    trained = target / "heads" / "medusa" / "head.json"
    trained.parent.mkdir(parents=True)
    trained.write_text("{}")
    build(tiny_checkpoint, small, target, silent, force=True)
    assert trained.read_text() == "{}"
    assert not Partial(target).root.exists()
    build(tiny_checkpoint, override(small, {"cache.context": 64}), target, silent, force=True)
    assert not trained.exists()
    assert "the draft heads of the replaced bundle are removed" in caplog.text


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# How a full disk reaches Python: by the number, from copies that coremltools makes with shutil,
# and from its C++ without a number. The texts were seen on a full file system.
FULL = {
    "errno": full(),
    "shutil": shutil.Error([("a", "b", f"{full()}: 'a' -> 'b'")]),
    "blob": RuntimeError("[MIL FileWriter]: Unknown error occurred while writing data to"),
    "package": RuntimeError("filesystem error: cannot copy: Input/output error [a] [b]"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
@pytest.mark.parametrize("shard", ["layer-00", "head-0"])
def test_disk_full(
    shard: str,
    error: Exception,
    stopped: Path,
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.rmtree(tmp_path / f"out.partial/bundle/shards/{shard}.mlpackage")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Lowering, "lower", fail)
    with pytest.raises(CetaneError, match="disk full") as stopped_by:
        build(tiny_checkpoint, small, stopped, silent)
    assert "run it again" in (stopped_by.value.hint or "")
    assert (tmp_path / "out.partial/bundle/embedding.npy").is_file()
    assert not stopped.exists()


@pytest.mark.parametrize("call", range(4))
def test_disk_full_then_finished(
    call: int,
    stopped: Path,
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    lowered: list[str],
) -> None:
    """At any rename: of the record, of a part, of its hashes, of the manifest."""
    (tmp_path / "out.partial/bundle/embedding.npy").unlink()
    replace, calls = os.replace, iter(range(100))

    def fail(source: Any, target: Any) -> None:
        if next(calls) == call:
            raise full()
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(CetaneError, match="disk full"):
        patch.setattr(os, "replace", fail)
        build(tiny_checkpoint, small, stopped, silent)
    assert_same(build(tiny_checkpoint, small, stopped, silent), undisturbed)
    assert lowered == []


def test_a_disk_that_refuses(
    stopped: Path, tiny_checkpoint: Checkpoint, small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CetaneError, match=r"cannot write .*Permission denied"):
        build(tiny_checkpoint, small, stopped, silent)


def test_other_errors_are_not_hidden(
    stopped: Path, tiny_checkpoint: Checkpoint, small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        build(tiny_checkpoint, small, stopped, silent)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
)
def test_weights_that_no_port_can_be_right_with(
    name: str, value: float, tiny_checkpoint_folder: Path, tmp_path: Path, small: Recipe
) -> None:
    folder = shutil.copytree(tiny_checkpoint_folder, tmp_path / "bad")
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[5] = torch.tensor(value)
    save_file(weights, folder / "model.safetensors")

    def skip(self: Lowering, shard: str, target: Path) -> None:
        for block in self.planner.members[shard]:
            block.load(self.weights)
        target.mkdir()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CetaneError, match=name):
        patch.setattr(Lowering, "lower", skip)
        build(open_checkpoint(folder), small, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_the_manifest_says_what_was_built(undisturbed: Bundle, tiny_checkpoint: Checkpoint) -> None:
    content = json.loads((undisturbed.path / "manifest.json").read_text())
    assert content["source"] == tiny_checkpoint.source
    assert content["fingerprint"] == tiny_checkpoint.fingerprint
    assert set(content["producer"]) == {"cetane", "coremltools", "torch", "transformers"}
    assert [shard["name"] for shard in content["plan"]["shards"]] == [
        "layer-00", "layer-01", "head-0",
    ]  # fmt: skip


def test_a_second_builder_is_told_who_builds(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, undisturbed: Bundle, stub: list[str]
) -> None:
    refused: list[CetaneError] = []

    def meanwhile(name: str, done: int, total: int) -> None:
        if name == "tokenizer":
            with pytest.raises(CetaneError) as raised:
                build(tiny_checkpoint, small, tmp_path / "out", silent)
            refused.append(raised.value)

    build(tiny_checkpoint, small, tmp_path / "out", meanwhile)
    (error,) = refused
    assert f"process {os.getpid()} on " in error.message and "building tiny" in error.message
    assert len(stub) == 3  # every shard once


def test_a_lock_ends_with_its_process(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    code = (
        "import os, pathlib, sys\nfrom cetane.files import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1]), 'dying'):\n    os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert "dying" in (tmp_path / ".out.lock").read_text()
    build(tiny_checkpoint, small, tmp_path / "out", silent)


def test_a_build_asks_for_its_space_first(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CetaneError, match="0 MB are free"):
        build(tiny_checkpoint, small, tmp_path / "out", silent)


def test_rebuild_mends_a_finished_bundle(
    undisturbed: Bundle, tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    """As the gates advise where its packages are not the checkpoint's."""
    target = tmp_path / "out"
    shutil.copytree(undisturbed.path, target)
    (target / "embedding.npy").write_bytes(b"damaged")
    with pytest.raises(CetaneError, match="bundle of another checkpoint or recipe"):
        build(tiny_checkpoint, override(small, {"head.slices": 2}), target, silent, rebuild=True)
    assert (target / "embedding.npy").read_bytes() == b"damaged"
    assert_same(build(tiny_checkpoint, small, target, silent, rebuild=True), undisturbed)
