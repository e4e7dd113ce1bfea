"""A kit, and its way through coremltools on this machine, where cetane's bridge predicts."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.measuring.conftest import ONE, environment, record, run

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline.import_kit import import_kit
from cetane.pipeline.kit import make_kit


def test_it_holds_packages_inputs_and_expected_outputs(
    archive: Path, contents: Any, pair: tuple[Bundle, Bundle]
) -> None:
    names = set(zipfile.ZipFile(archive).namelist())
    assert {"kit/measure.py", "kit/measuring/run.py", "kit/A/host.json"} <= names
    kit = json.load(contents("kit.json"))
    for label, bundle in zip("AB", pair, strict=True):
        assert kit["bundles"][label]["digest"] == bundle.digest
        weights = contents(f"{label}/shards/model.mlpackage/Manifest.json").read()
        assert weights == (bundle.shard("model") / "Manifest.json").read_bytes()
        probe = json.load(contents(f"{label}/probes.json"))[0]
        tokens = [token for call in probe["calls"] for token in call["tokens"]]
        expected = np.load(contents(f"{label}/expected-text.npy"))
        assert len(expected) == 13 and len(tokens) == 28  # a prompt of 16, then 12 tokens
        late = json.load(contents(f"{label}/probes.json"))[1]
        assert [call["logits"] for call in late["calls"]] == [False] * 20 + [True] * 12
        assert len(np.load(contents(f"{label}/expected-late.npy"))) == 12  # to the end, 32
    assert set(kit["files"]) == {n.removeprefix("kit/") for n in names} - {"kit.json"}


def test_the_script_needs_no_cetane(contents: Any, archive: Path) -> None:
    packed = zipfile.ZipFile(archive)
    sources = [name for name in packed.namelist() if name.endswith(".py")]
    assert len(sources) > 10
    assert not any(b"import cetane" in packed.read(n) or b"from cetane" in packed.read(n)
                   for n in sources)  # fmt: skip
    header = contents("measure.py").read().decode()
    assert header.startswith("# /// script\n") and "coremltools==9.0" in header  # PEP 723


def test_the_same_bundles_give_the_same_kit(
    archive: Path, pair: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    again = make_kit([bundle.path for bundle in pair], tmp_path / "again.zip")
    assert again.path.read_bytes() == archive.read_bytes()


def test_one_or_two_bundles(pair: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="one or two bundles, not 3"):
        make_kit([pair[0].path] * 3, tmp_path / "kit.zip")
    with pytest.raises(CetaneError, match="is inside"):
        make_kit([pair[0].path], pair[0].path / "kit.zip")


def test_a_place_that_takes_no_files_is_told_first(
    pair: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.pipeline.kit.write_folder", None)
    with pytest.raises(CetaneError, match=r"cannot write /proc/kit\.zip"):
        make_kit([pair[0].path], "/proc/kit.zip")


def test_a_bundle_that_gives_choices_is_refused(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    """It has no logits that could be near or far from the expected ones."""
    bundle = tiny_bundle(head={"choose": True}, **ONE)
    with pytest.raises(CetaneError, match="gives choices, not logits"):
        make_kit([bundle.path], tmp_path / "kit.zip")
    assert not (tmp_path / "kit.zip").exists()


def test_through_the_bridge_and_back(pair: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    """coremltools takes seconds to import, once for each child: so one bundle here, and two with
    every fault in benchmarks/kit_faults.py."""
    bundle = shutil.copytree(pair[1].path, tmp_path / "bundle")
    archive = make_kit([bundle], tmp_path / "kit.zip").path
    zipfile.ZipFile(archive).extractall(tmp_path)
    kit = tmp_path / "kit"
    done = run(kit, "--rounds", "1", prefix=("-m", "cetane.bridge"), env=environment(stub=False))
    assert done.returncode == 0, done.stderr
    (outcome,) = import_kit(kit / "measurements.json", [bundle]).outcomes
    assert outcome.passed and not outcome.device
    assert outcome.positions == 25 and outcome.figures.turns == 1 and not outcome.faults
    errors = record(kit)["bundles"]["A"]["functions"]["model/decode"]["predict"]["errors"]
    assert "logits_0" in errors and max(errors.values()) < 2e-3  # fp16 at the border
    assert "not kept" in outcome.notes[-1]


@pytest.mark.parametrize("one", ["bundle", Path("bundle")])
def test_a_bundle_without_a_list(one: Any, tmp_path: Path) -> None:
    """A text was taken for bundles with names of one letter."""
    with pytest.raises(CetaneError, match=r"a kit takes a list of bundles .give \['bundle'\]"):
        make_kit(one, tmp_path / "kit.zip")
