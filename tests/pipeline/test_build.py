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
from tests.converting import converted_once
from tests.tasks.work import Inline

import cetane.pipeline.assembly
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.files import records, remove
from cetane.lower.lower import Lowering
from cetane.pipeline import compression_choice
from cetane.pipeline.assembly import build_key, refuse
from cetane.pipeline.build import build, build_only
from cetane.pipeline.partial import Partial, read_note
from cetane.pipeline.parts import job_of, make_part, opened
from cetane.pipeline.stored_bundles import bundle_key
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe
from cetane.store.settings import using
from cetane.store.store import Store, result_path

pytestmark = pytest.mark.usefixtures("shared_templates")
PARTS = [
    "embedding.npy",
    "tokenizer",
    "recipe.toml",
    "rotary-default.npy",
    "shards/layer-00.mlpackage",
    "shards/head-0.mlpackage",
    "shards/layer-01.mlpackage",
]
"""In the order in which they are made: the second layer is of the first one's kind."""
STEPS = [*PARTS, "done"]


class Stop(BaseException):
    """A kill, as far as Python can see one."""


def silent(*_: Any, **__: Any) -> None:
    pass


def stop_at(step: str) -> Callable[[str, int, int], None]:
    def progress(name: str, done: int, total: int) -> None:
        if name == step:
            raise Stop

    return progress


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """The smallest build of several shards."""
    return {"verify": None, "prefill": None, "layout": {"kind": "per-block"}, "context": 32}


@pytest.fixture(scope="session")
def small(recipe: Callable[..., Recipe], options: dict[str, Any]) -> Recipe:
    return recipe(**options)


@pytest.fixture(scope="session")
def undisturbed(tiny_bundle: Callable[..., Bundle], options: dict[str, Any]) -> Bundle:
    with converted_once():
        return tiny_bundle(**options)


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


def assert_same(bundle: Bundle, other: Bundle) -> None:
    bundle.verify()
    assert (bundle.path / "manifest.json").read_bytes() == (
        other.path / "manifest.json"
    ).read_bytes()
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]


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
    """And what was made, and what is left; the first build and one that makes all say nothing."""
    target = tmp_path / "out"
    caplog.set_level("INFO", "cetane")
    with pytest.raises(Stop):
        build(tiny_checkpoint, small, target, stop_at("rotary-default.npy"))
    for rebuild in (True, False):
        with pytest.raises(Stop):
            build(tiny_checkpoint, small, target, stop_at("rotary-default.npy"), rebuild=rebuild)
    (told,) = caplog.messages
    assert told == f"an earlier build left 3 of 7 parts in {target}.partial: 4 are still to make"


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


@pytest.mark.parametrize("record", ["key.json", "done/embedding.npy.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_record_that_was_damaged_is_not_trusted(
    record: str,
    content: bytes,
    stopped: Path,
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
) -> None:
    file = tmp_path / "out.partial" / record
    assert file.is_file()
    file.write_bytes(content)
    made: list[str] = []
    parts = cetane.pipeline.assembly.parts

    def note(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
        return lambda path: (made.append(name), make(path))[1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(
            cetane.pipeline.assembly,
            "parts",
            lambda *args: {n: note(n, m) for n, m in parts(*args).items()},
        )
        build(tiny_checkpoint, small, stopped, stop_at("shards/layer-00.mlpackage"))
    assert made == (PARTS[:4] if record == "key.json" else ["embedding.npy"])


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
    options: dict[str, Any],
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
        build(tiny_checkpoint, recipe(**options | {"context": 64}), stopped, silent)
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


@pytest.mark.parametrize("force", [True, False], ids=["force", "rebuild"])
@pytest.mark.parametrize("step", ["before", "between", "heads", "half-removed", "removing"])
def test_a_kill_while_a_bundle_is_replaced(
    step: str, force: bool, tiny_checkpoint: Checkpoint, small: Recipe, tmp_path: Path,
    undisturbed: Bundle, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same command goes on, and the draft heads are where they were."""
    target = shutil.copytree(undisturbed.path, tmp_path / "bundle")
    trained = target / "heads" / "medusa" / "head.json"
    trained.parent.mkdir(parents=True)
    trained.write_text("{}")
    partial, rename = Partial(target), Path.rename
    ends = {"before": partial.earlier, "between": target, "heads": target / "heads"}

    def renaming(self: Path, to: Path) -> Path:
        if to == ends.get(step):
            raise Stop
        return rename(self, to)

    def removing(path: Path) -> None:
        if step == "half-removed" and path == partial.earlier:
            (path / "manifest.json").unlink()
            raise Stop
        if step == "removing" and path == partial.root and partial.done.exists():
            shutil.rmtree(partial.done)
            raise Stop
        remove(path)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Path, "rename", renaming)
        patch.setattr("cetane.pipeline.partial.remove", removing)
        build(tiny_checkpoint, small, target, silent, force=force, rebuild=not force)
    build(tiny_checkpoint, small, target, silent, force=force, rebuild=not force)
    assert trained.read_text() == "{}"
    shutil.rmtree(target / "heads")
    assert_same(Bundle(target), undisturbed)


def test_force_never_replaces_what_is_no_bundle(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(CetaneError):
            build(tiny_checkpoint, small, tmp_path, silent, force=force)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


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


def made(target: Path) -> list[str]:
    """The shards that are on disk."""
    return sorted(path.stem for path in target.glob("shards/*.mlpackage"))


def test_the_gate_comes_before_the_others(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """It gets the first shard of every kind; when it is green, the build goes on."""
    judged: list[dict[str, Path]] = []

    def gate(planner: Any, packages: dict[str, Path]) -> None:
        assert planner.recipe == small
        assert all((path / "Manifest.json").read_text() == n for n, path in packages.items())
        assert stub == ["layer-00", "head-0"]
        judged.append(packages)

    seen: list[str] = []
    bundle = build(
        tiny_checkpoint, small, tmp_path / "out", lambda *call: seen.append(call[0]), gate=gate
    )
    assert [list(packages) for packages in judged] == [["layer-00", "head-0"]]
    assert seen == STEPS
    assert stub == ["layer-00", "head-0", "layer-01"]
    bundle.verify()


def test_a_red_gate_stops_the_build(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """Of the rest nothing is made; run again, it is asked again, and what was made is kept."""
    target = tmp_path / "out"

    def red(*_: Any) -> None:
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            build(tiny_checkpoint, small, target, silent, gate=red)
        assert made(tmp_path / "out.partial/bundle") == ["head-0", "layer-00"]
        assert not (tmp_path / "out.partial/bundle/manifest.json").exists()
        assert not target.exists()
    assert stub == ["layer-00", "head-0"]
    build(tiny_checkpoint, small, target, silent, gate=silent).verify()
    assert stub == ["layer-00", "head-0", "layer-01"]


def test_a_finished_bundle_is_not_judged_again(
    undisturbed: Bundle, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    def red(*_: Any) -> None:
        raise Stop

    build(tiny_checkpoint, small, undisturbed.path, silent, gate=red)


@pytest.fixture
def failing(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The shards that cannot be made; empty it to mend them."""
    names: set[str] = set()
    lower = Lowering.lower

    def fail(self: Lowering, shard: str, target: Path) -> None:
        if shard in names:
            target.mkdir()
            raise CetaneError(f"no {shard} today", "tomorrow")
        lower(self, shard, target)

    monkeypatch.setattr(Lowering, "lower", fail)
    return names


@pytest.mark.parametrize(
    "wrong", [{"layer-00"}, {"layer-01"}, {"head-0"}, {"layer-00", "head-0"},
              {"layer-00", "layer-01"}]
)  # fmt: skip
def test_a_shard_that_fails_does_not_stop_the_others(
    wrong: set[str],
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    failing: set[str],
    stub: list[str],
) -> None:
    """All that failed are named, no bundle is there, and mended they are all that is made."""
    failing |= wrong
    target = tmp_path / "out"
    with pytest.raises(CetaneError) as stopped_by:
        build(tiny_checkpoint, small, target, silent)
    assert all(f"no {shard} today" in stopped_by.value.message for shard in wrong)
    if len(wrong) == 1:
        assert stopped_by.value.hint == "tomorrow"
    else:
        assert stopped_by.value.message.startswith(f"{len(wrong)} parts failed: shards/")
        assert "run the same command again" in (stopped_by.value.hint or "")
    others = {"layer-00", "layer-01", "head-0"} - wrong
    assert set(stub) == others
    assert made(tmp_path / "out.partial/bundle") == sorted(others)
    assert not list((tmp_path / "out.partial/bundle").glob("**/.*"))
    assert not target.exists()
    assert not (tmp_path / "out.partial/bundle/manifest.json").exists()

    failing.clear()
    stub.clear()
    build(tiny_checkpoint, small, target, silent).verify()
    assert set(stub) == wrong


def test_a_cause_of_several_failures_is_told_once() -> None:
    full, other = CetaneError("disk full"), CetaneError("no layer-02 today")
    with pytest.raises(CetaneError) as told:
        refuse({"layer-00": full, "layer-02": other, "layer-01": CetaneError("disk full")})
    assert told.value.message == (
        "3 parts failed: layer-00, layer-01: disk full; layer-02: no layer-02 today"
    )


def test_a_first_shard_that_fails_is_not_judged(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, failing: set[str], stub: list[str]
) -> None:
    """Without it the gate would prove nothing, so nothing is built on it."""
    failing.add("layer-00")
    with pytest.raises(CetaneError, match="no layer-00 today"):
        build(
            tiny_checkpoint, small, tmp_path / "out", silent, gate=lambda *_: pytest.fail("judged")
        )
    assert stub == ["head-0"]


def test_only_some_shards(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """No bundle yet, but a build takes them up."""
    target = tmp_path / "out"
    seen: list[tuple[str, int, int]] = []
    note: Callable[..., None] = lambda *call: seen.append(call)  # noqa: E731
    packages = build_only(tiny_checkpoint, small, target, ["layer-01"], note)
    assert packages == {"layer-01": tmp_path / "out.partial/bundle/shards/layer-01.mlpackage"}
    assert seen == [("shards/layer-01.mlpackage", 0, 1), ("done", 1, 1)]
    assert stub == ["layer-01"]
    assert not target.exists()

    found = build_only(tiny_checkpoint, small, target, ["layer-*", "head-0"], silent)
    assert sorted(found) == ["head-0", "layer-00", "layer-01"]
    assert all(path.is_dir() for path in found.values())
    assert sorted(stub) == ["head-0", "layer-00", "layer-01"]
    assert not target.exists()
    assert not (tmp_path / "out.partial/bundle/manifest.json").exists()

    bundle = build(tiny_checkpoint, small, target, silent)
    bundle.verify()
    assert len(stub) == 3


@pytest.mark.parametrize("patterns", [["layer-7"], ["layer-00", "x*"], ["Layer-00"], [""]])
def test_only_shards_that_there_are(
    patterns: list[str], tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    with pytest.raises(CetaneError, match="no such shard") as refused:
        build_only(tiny_checkpoint, small, tmp_path / "out", patterns, silent)
    assert patterns[-1] in refused.value.message
    assert refused.value.hint == "there are layer-00, layer-01, head-0"
    assert stub == []
    assert list(tmp_path.iterdir()) == []


def test_only_fails_for_each_of_them(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, failing: set[str], stub: list[str]
) -> None:
    failing |= {"layer-00", "layer-01"}
    with pytest.raises(CetaneError, match=r"2 parts failed: .*layer-00.*layer-01"):
        build_only(tiny_checkpoint, small, tmp_path / "out", ["*"], silent)
    assert stub == ["head-0"]


def test_rebuild(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """What is there is made anew, only when it is asked for."""
    target = tmp_path / "out"
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent)
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent)
    assert stub == ["layer-00"]
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent, rebuild=True)
    assert stub == ["layer-00"] * 2
    build(tiny_checkpoint, small, target, silent, rebuild=True).verify()
    assert stub == ["layer-00", "layer-00", "layer-00", "head-0", "layer-01"]


def test_a_kill_while_a_part_is_made_anew(
    stopped: Path,
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    undisturbed: Bundle,
    lowered: list[str],
) -> None:
    """Between the new part and its record, the old record is of other files."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):

        def write(self: Lowering, shard: str, target: Path) -> None:
            target.mkdir()
            (target / "Manifest.json").write_text("other")

        def die(*_: Any) -> None:
            raise Stop

        patch.setattr(Lowering, "lower", write)
        patch.setattr(Partial, "record", die)
        build_only(tiny_checkpoint, small, stopped, ["layer-00"], silent, rebuild=True)
    assert_same(build(tiny_checkpoint, small, stopped, silent), undisturbed)
    assert lowered == ["layer-00"]


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


@pytest.mark.parametrize("there", [True, False], ids=["bundle-there", "no-bundle"])
def test_a_stranger_of_its_name_stays(
    there: bool, undisturbed: Bundle, tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    """`OUTPUT.partial` may be the user's own, as half a download is."""
    target, own = tmp_path / "out", tmp_path / "out.partial"
    own.mkdir()
    (own / "thesis.txt").write_text("mine")
    if there:
        shutil.copytree(undisturbed.path, target)
        build(tiny_checkpoint, small, target, silent)
    else:
        with pytest.raises(CetaneError, match="no build has left it"):
            build(tiny_checkpoint, small, target, silent)
    assert (own / "thesis.txt").read_text() == "mine"
    (own / "thesis.txt").unlink()
    assert Partial(target).ours  # as it is while the first folders are made


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


def test_a_note_that_is_no_file_counts_as_none(tmp_path: Path) -> None:
    """Reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "key.json")
    (tmp_path / "folder.json").mkdir()
    assert [read_note(tmp_path / f"{name}.json") for name in ("key", "folder", "no")] == [None] * 3
