"""What a stopped build leaves beside its output, and what is no build's."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.builds import PARTS, Stop, assert_same, silent, stop_at

import cetane.pipeline.assembly
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import remove
from cetane.lower.lower import Lowering
from cetane.pipeline.build import build, build_only
from cetane.pipeline.partial import Partial, read_note
from cetane.schema.recipe import Recipe

pytestmark = pytest.mark.usefixtures("shared_templates")


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


@pytest.mark.parametrize("name", ["bundle", "store", "earlier", "done"])
def test_links_are_left_by_no_build(name: str, tmp_path: Path) -> None:
    """A build that went on removed the hidden files of a folder to which `bundle` led."""
    partial, theirs = Partial(tmp_path / "out"), tmp_path / "theirs"
    partial.start("key")
    theirs.mkdir()
    (theirs / ".bashrc").touch()
    remove(partial.root / name)
    (partial.root / name).symlink_to(theirs)
    with pytest.raises(CetaneError, match=r"out\.partial exists, and no build has left it"):
        partial.start("key")
    partial.resume()
    assert (theirs / ".bashrc").exists() and not partial.target.exists()


def test_a_note_that_is_no_file_counts_as_none(tmp_path: Path) -> None:
    """Reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "key.json")
    (tmp_path / "folder.json").mkdir()
    assert [read_note(tmp_path / f"{name}.json") for name in ("key", "folder", "no")] == [None] * 3
