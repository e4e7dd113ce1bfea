"""cetane sweep, as a user sees it, and what its recipe builds."""

import shlex
from pathlib import Path

import pytest
from PIL import Image

from cetane.bundle import Bundle

from .conftest import Cetane

TEXT = "The rating of how readily a fuel ignites is its cetane number. " * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_a_sweep_chooses_a_recipe_that_ports(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my sweep"
    sweep = (
        "sweep", tiny_checkpoint_folder, "-r", small_file, "--text", text, "-o", folder,
        "--formats", "palette8-weighted-group32", "--budget", "12",
    )  # fmt: skip
    found = cetane(*sweep, "--json").json
    assert {"fp16", "palette8-weighted-group32"} < {p["name"] for p in found["points"]}
    most = found["budget_bytes"] - found["table_bytes"]
    fitting = [p for p in found["points"] if p["weight_bytes"] <= most]
    point = min(fitting, key=lambda p: p["kl"])
    assert found["chosen"] == point["name"] == "palette8-weighted-group32"
    assert {Path(path).name for path in found["files"]} == {
        "sweep.svg", "sweep.png", "recipe.toml",
    }  # fmt: skip
    assert Image.open(folder / "sweep.png").size[0] > 800
    assert (folder / "sweep.svg").read_text().startswith("<?xml")

    *_, last = cetane(*sweep, "--chip", "a19-pro", "--os", 27).out.splitlines()
    port = ["cetane", "port", str(tiny_checkpoint_folder), "-r", str(folder / "recipe.toml"),
            "--chip", "a19-pro", "--os", "27", "--no-require-residency"]  # fmt: skip
    assert shlex.split(last.removeprefix("next: ")) == port, "a shell takes it as it is"

    bundle = tmp_path / "bundle"
    arguments = ("port", tiny_checkpoint_folder, "-r", folder / "recipe.toml", "-o", bundle)
    ported = cetane(*arguments, "--json")
    assert ported.code == 0, ported.err
    assert Bundle(bundle).plan.weight_bytes == point["weight_bytes"]
    # The finished bundle is taken for that of the recipe.
    assert cetane(*arguments, "--json").json["digest"] == ported.json["digest"]
    (folder / "sensitivity.safetensors").write_bytes(b"another")
    assert "not the file" in cetane(*arguments, "--force").error


def test_a_sweep_for_people(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/recipe.toml").write_text("chosen = 'by a sweep of another model'")
    result = cetane(
        "sweep", tiny_checkpoint_folder, "-r", small_file, "--text", text, "-o", tmp_path / "out",
        "--formats", "int4-per-block32", "--budget", "0.000001GB", "-v",
    )  # fmt: skip
    assert result.code == 1, "nothing is so small"
    assert "int4-per-block32" in result.out
    assert "no point has at most" in result.out and "raise --budget" in result.out
    assert "predicted" in result.out
    told = [line for line in result.err.splitlines() if "are read off the ANE (" in line]
    reasons = [line.partition(" with ")[0] for line in told]
    assert told and len(set(reasons)) == len(reasons), "points of one reason have one line"
    assert not (tmp_path / "out" / "recipe.toml").exists()


def test_the_size_without_a_budget_judges_nothing(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, text: Path, tmp_path: Path
) -> None:
    """It is that of 4 bits: who asks for formats of 8 bits did not ask for it."""
    result = cetane(
        "sweep", tiny_checkpoint_folder, "-r", small_file, "--text", text, "-o", tmp_path / "out",
        "--formats", "int8-per-tensor",
    )  # fmt: skip
    assert result.code == 0
    told = " ".join(result.out.split())
    assert "which is the size without --budget" in told and "name a --budget" in told
    assert "next:" not in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--formats", "palette5-kmeans-group32"), "--formats palette5-kmeans-group32"),
        (("--budget", "small"), "--budget small: not a size"),
        (("--budget", "0"), "--budget 0: not a size"),
        (("--budget", "-4"), "--budget -4: not a size"),
        (("--budget", "9" * 400), "9: not a size"),
        (("--budget", "9" * 400 + "GB"), "9GB: not a size"),
        (("--chip", "z80"), "no chip 'z80'"),
        (("--text", "missing.txt"), "cannot read missing.txt: No such file or directory"),
        (("-r", "nothing"), "no recipe 'nothing'"),
    ],
)
def test_bad_arguments(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    text: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    usual = {"--text": text, "-r": small_file, "-o": tmp_path / "out"}
    others = [x for pair in usual.items() if pair[0] != arguments[0] for x in pair]
    told = cetane("sweep", tiny_checkpoint_folder, *others, *arguments).error
    assert message in told and "Errno" not in told
    assert not (tmp_path / "out").exists()


def test_a_chip_of_unknown_speed_leaves_no_folder(
    cetane: Cetane, tiny_checkpoint_folder: Path, text: Path, tmp_path: Path
) -> None:
    here = {path.name for path in tmp_path.iterdir()}
    asked = ("--text", text, "-o", tmp_path / "out", "--chip", "m3-pro")
    refused = cetane("sweep", tiny_checkpoint_folder, *asked)
    assert refused.error.startswith("no rate at which M3 Pro reads weights was measured")
    assert {path.name for path in tmp_path.iterdir()} == here


def test_other_bad_input(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, text: Path, tmp_path: Path
) -> None:
    usual = ("sweep", tiny_checkpoint_folder, "-r", small_file)
    (tmp_path / "short.txt").write_text("a few words")
    assert "too few for a sweep" in cetane(*usual, "--text", tmp_path / "short.txt").error
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in cetane(*usual, "--text", tmp_path / "binary.txt").error
    (tmp_path / "file").touch()
    assert "cannot write" in cetane(*usual, "--text", text, "-o", tmp_path / "file").error
    assert "no such file or folder" in cetane("sweep", tmp_path / "none", "--text", text).error
    other = tmp_path / "other"
    other.mkdir()
    (other / "sweep.jsonl").write_text("{}\n")
    assert "sweep.jsonl: line 1" in cetane(*usual, "--text", text, "-o", other).error
