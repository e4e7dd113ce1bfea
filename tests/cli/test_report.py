"""cetane report: a page and its figures, or one line that says what is wrong."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Cetane

from cetane.bundle import Bundle


def test_a_bundles_page_and_its_figures(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    page = tmp_path / "made" / "page.html"
    result = cetane("report", ported.path, "-o", page, "--json")
    beside = json.loads(page.with_suffix(".json").read_text())
    assert result.json == beside | {"page": str(page), "json": str(page.with_suffix(".json"))}
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in page.parent.iterdir()) == ["page.html", "page.json"]
    first = page.read_bytes()
    shown = cetane("report", ported.path, "-o", page)
    assert shown.code == 0 and page.read_bytes() == first
    *_, last = shown.out.splitlines()
    assert last == f"next: cetane export {ported.path} --layout contract -o page-app"


@pytest.mark.parametrize("options", [("--chip", "m3-pro"), ()], ids=["no rate", "no checkpoint"])
def test_the_command_for_missing_predictions_makes_the_page(
    options: tuple[str, ...], cetane: Cetane, tiny_bundle: Callable[..., Bundle],
    tiny_checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As it stands, but for the checkpoint, which cetane cannot know."""
    monkeypatch.chdir(tmp_path)
    bundle = shutil.copytree(tiny_bundle().path, tmp_path / "my bundle")
    manifest = bundle / "manifest.json"
    if not options:
        content = json.loads(manifest.read_text()) | {"source": "moved"}
        manifest.write_text(json.dumps(content))
    told = cetane("report", bundle.name, "-o", "page.html", "--json", *options).json["predicted"]
    place = shlex.quote(str(tiny_checkpoint_folder))
    words = shlex.split(told["command"].replace("CHECKPOINT", place))
    made = cetane(*words[1:], "--json")
    assert made.code == 0 and made.json["page"] == "my bundle.html"
    assert made.json["predicted"]["chip"] == "M4 Max"


def test_an_experiments_page(cetane: Cetane, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cetane("report", "triforce-quest", "--lab", tmp_path, "-o", page, "--json")
    assert (result.code, result.json["status"]) == (0, "Shelved")
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-thing"], "no such bundle, and no experiment 'no-such-thing'"),
        (["smollm2", "--sweep", "sweep"], "smollm2: no such bundle"),
        (["triforce-ques"], "did you mean 'triforce-quest'"),
        (["no/such/bundle"], "no such bundle"),
        (["../x"], "no such bundle"),
        (["triforce-quest", "--lab", "none"], "none: no such folder"),
        (["triforce-quest", "--bench", "x.json"], "for a bundle's page"),
    ],
)
def test_what_is_not_there(cetane: Cetane, tmp_path: Path, arguments: list[str], said: str) -> None:
    page = tmp_path / "folder/page.html"
    assert said in cetane("report", *arguments, "-o", page).error
    assert not page.parent.exists()


def test_a_place_that_takes_no_files_has_the_name_that_was_given(cetane: Cetane) -> None:
    """Its JSON is written first, under a name that nobody gave."""
    refused = cetane("report", "int8-weights", "-o", "/proc/page.html")
    assert refused.error.startswith("cannot write /proc/page.html: ")


def test_wrong_use(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert "must end in .html" in cetane("report", ported.path, "-o", tmp_path / "page").error
    assert "no chip" in cetane("report", ported.path, "-o", page, "--chip", "m99").error
    assert "no such file" in cetane("report", ported.path, "-o", page, "--sweep", "none").error
    assert "cannot read" in cetane("report", ported.path, "-o", page, "--bench", "none").error
    assert "no such file" in cetane("report", ported.path, "-o", page, "--model", "none").error
    inside = cetane("report", ported.path, "-o", ported.path / "manifest.html")
    assert inside.code == 2 and "is inside" in inside.err
    (tmp_path / "file").write_text("")
    assert cetane("report", ported.path, "-o", tmp_path / "file" / "page.html").code == 2
    assert not page.exists()
    (tmp_path / "page.json").mkdir()
    assert cetane("report", ported.path, "-o", page).error == (
        f"cannot write {tmp_path / 'page.json'}: Is a directory"
    )
