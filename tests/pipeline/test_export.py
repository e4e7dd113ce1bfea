"""Exported folders: a folder keeps good packages, and says truly from which bundle it is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.checkpoint import open_checkpoint
from cetane.compress.fitted import save
from cetane.compress.formats import parse_format
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.pipeline import export, replacement
from cetane.pipeline.build import build
from cetane.pipeline.export import export_contract, export_runtime
from cetane.pipeline.replacement import replace_package
from cetane.pipeline.runtime_folder import JUDGES, RUNTIMES, check_folder
from cetane.schema.recipe import Recipe

FILES = ("model", "weights")


class Pairs:
    """A runtime whose packages are two files of one text."""

    APP, COMPILE, FILES = "Pairs", "", ()
    made = "new"

    def packages(self, *_: Any) -> dict[str, Callable[[Path], None]]:
        return {"one": self.make, "two": self.make}

    def make(self, package: Path) -> None:
        package.mkdir()
        for file in FILES:
            (package / file).write_text(self.made)

    def export(self, recipe: Any, checkpoint: Any, target: Path, progress: Any) -> None:
        target.mkdir()
        (target / "meta.yaml").write_text("{}")
        for name, make in self.packages().items():
            make(target / f"{name}.mlpackage")

    def check(self, folder: Path) -> list[str]:
        return [] if {texts(folder, name) for name in ("one", "two")} <= GOOD else ["damaged"]


GOOD = {("old",) * 2, ("new",) * 2}


def texts(folder: Path, name: str) -> tuple[str, ...]:
    """What a package's files hold."""
    return tuple(file.read_text() for file in sorted((folder / f"{name}.mlpackage").glob("*")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two old packages, of a runtime and a bundle that are only played."""
    bundle = SimpleNamespace(plan=SimpleNamespace(recipe=None), digest="b1")
    for module in (export, replacement):
        monkeypatch.setattr(module, "Bundle", lambda _: bundle)
        monkeypatch.setattr(module, "own_checkpoint", lambda *_: None)
    monkeypatch.setitem(RUNTIMES, "anemll", Pairs())
    monkeypatch.setitem(JUDGES, "anemll", lambda *_: ([], []))
    monkeypatch.setattr(Pairs, "made", "old")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, make in Pairs().packages().items():
        make(folder / f"{name}.mlpackage")
    monkeypatch.setattr(Pairs, "made", "new")
    return folder


def test_fitted_constants_that_are_gone(
    tiny_checkpoint_folder: Path,
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bundle's recipe cannot be changed, so the hint is not to change it."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    weight = "model.layers.0.mlp.up_proj.weight"
    form = parse_format("palette4-kmeans-group8")
    fitted = save(
        {weight: form.encode(checkpoint.read(weight).float().numpy())}, "key", checkpoint.content
    )
    compression = {"default": form.name, "method": "gptq", "fitted": fitted.model_dump()}
    bundle = build(checkpoint, recipe(compression=compression), tmp_path / "bundle", silent)
    assert export_runtime(bundle.path, tmp_path / "out", "anemll").passed
    fitted.path.unlink()
    with pytest.raises(CetaneError, match="has fitted constants") as caught:
        export_runtime(bundle.path, tmp_path / "again", "anemll")
    assert caught.value.message.endswith(fitted.file[-20:])  # a long path has no middle
    assert "--layout contract" in str(caught.value.hint)
    assert export_contract(bundle.path, tmp_path / "contract").is_dir()


def anew(folder: Path | str, package: str) -> Any:
    return replace_package("bundle", folder, "anemll", package)


def die(*_: Any, **__: Any) -> None:
    os._exit(9)


def lose_a_file_and_die(path: Path, **_: Any) -> None:
    next(file for file in path.rglob("*") if file.is_file()).unlink()
    os._exit(9)


@pytest.mark.parametrize(
    ("owner", "name", "death", "left"),
    [(Pairs, "make", die, "old"), (Pairs, "check", die, "old"),
     (shutil, "rmtree", lose_a_file_and_die, "new")],
    ids=["while it is made", "while it is checked", "while the old one is removed"],
)  # fmt: skip
def test_a_kill(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    death: Callable[..., None],
    left: str,
) -> None:
    """The next package that is made anew finds whole packages, each old or checked."""
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(owner, name, death)
        anew(folder, "one")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert anew(folder, "two").passed
    assert (texts(folder, "one"), texts(folder, "two")) == ((left,) * 2, ("new",) * 2)
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_a_kill_while_a_new_folder_is_checked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder is there unchecked, and the same command makes it."""
    export.Bundle("").path = tmp_path / "bundle"
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Pairs, "check", die)
        export_runtime("bundle", tmp_path / "new", "anemll")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "new").exists()
    made = export_runtime("bundle", tmp_path / "new", "anemll")
    assert made.passed and (made.path / "cetane.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "new"}


def test_a_folder_that_appears_while_the_bundle_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somebody's, so nothing removes it."""
    bundle = SimpleNamespace(path=tmp_path / "bundle", plan=SimpleNamespace(recipe=None))
    monkeypatch.setattr(export, "Bundle", lambda _: bundle)
    monkeypatch.setattr(
        export, "own_checkpoint", lambda *_: (tmp_path / "out/mine").mkdir(parents=True)
    )
    monkeypatch.setitem(RUNTIMES, "anemll", Pairs())
    with pytest.raises(CetaneError, match="out exists"):
        export_runtime("bundle", tmp_path / "out", "anemll")
    assert (tmp_path / "out/mine").is_dir()


def test_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert anew(".", "one").passed and texts(folder, "one") == ("new", "new")


def test_a_folder_says_from_which_bundle_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer, once one of its packages is another bundle's, or was never compared."""
    export.Bundle("").path = tmp_path / "bundle"
    made = export_runtime("bundle", tmp_path / "new", "anemll").path
    origin = json.loads((made / "cetane.json").read_text())
    assert origin["bundle"] == "b1" and len(origin["files"]) == 5
    for digest, content, kept in (
        ("b1", "new", True), ("b1", "old", False), ("b2", "new", False)
    ):  # fmt: skip
        copy = tmp_path / f"{digest} {content}"
        shutil.copytree(made, copy)
        export.Bundle("").digest = digest
        monkeypatch.setattr(Pairs, "made", content)
        assert anew(copy, "one").passed
        assert (copy / "cetane.json").exists() == kept


@pytest.mark.parametrize("content", ["new", "old"], ids=["as it was", "another"])
def test_a_package_anew_beside_one_that_has_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """The change is named, and stays known: it was compared with no bundle."""
    export.Bundle("").path = tmp_path / "bundle"
    made = export_runtime("bundle", tmp_path / "new", "anemll").path
    for file in FILES:  # whole, so the runtime's own check finds nothing
        (made / "two.mlpackage" / file).write_text("old")
    monkeypatch.setattr(Pairs, "made", content)
    again = anew(made, "one")
    assert not again.passed and "two.mlpackage" in again.problems[0]
    assert texts(made, "one") == (content,) * 2
    assert not check_folder(made).passed


def test_a_folder_with_a_problem_is_no_bundles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may publish it under the bundle's gates."""
    export.Bundle("").path = tmp_path / "bundle"
    monkeypatch.setattr(Pairs, "made", "wrong")
    made = export_runtime("bundle", tmp_path / "new", "anemll")
    assert made.problems == ["damaged"] and not (made.path / "cetane.json").exists()


def damaged(folder: Path) -> None:
    (folder / "one.mlpackage" / FILES[0]).write_text("old")


def added(folder: Path) -> None:
    shutil.copytree(folder / "one.mlpackage", folder / "merged_full.mlpackage")


def compiled(folder: Path) -> None:
    shutil.rmtree(folder / "one.mlpackage")
    (folder / "one.mlmodelc").mkdir()


def listed_nowhere(folder: Path) -> None:
    (folder / "cetane.json").write_text('{"bundle": "b1"}')


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: None, None),
        (damaged, f"one.mlpackage/{FILES[0]} is not the file that was built (its hash differs)"),
        (lambda folder: shutil.rmtree(folder / "two.mlpackage"), "is missing"),
        (lambda folder: (folder / "meta.yaml").write_text("x"), "meta.yaml is not the file that"),
        (added, "merged_full.mlpackage is not in cetane.json"),
        (compiled, None),
        (listed_nowhere, "cetane.json lists no files"),
    ],
)
def test_a_folder_that_was_changed(
    change: Callable[[Path], Any],
    problem: str | None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its files are no longer those that were compared with the bundle."""
    export.Bundle("").path = tmp_path / "bundle"
    made = export_runtime("bundle", tmp_path / "new", "anemll").path
    monkeypatch.setattr(Pairs, "check", lambda *_: [])
    change(made)
    problems = check_folder(made).problems
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_a_package_with_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pairs, "made", "wrong")
    assert anew(folder, "one").problems == ["damaged"] and texts(folder, "one") == ("old", "old")
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_a_package_with_a_problem_in_a_compiled_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled one is the old one, and stays alone."""
    (folder / "one.mlpackage").rename(folder / "one.mlmodelc")
    monkeypatch.setattr(Pairs, "made", "wrong")
    assert anew(folder, "one").problems == ["damaged"]
    assert sorted(path.name for path in folder.iterdir()) == ["one.mlmodelc", "two.mlpackage"]
