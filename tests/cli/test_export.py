"""cetane export, as a user sees it."""

import json
import shlex
import shutil
from pathlib import Path

import onnx
import pytest

from cetane.bundle import Bundle
from cetane.gates.coreai import CoreAIResult
from cetane.gates.verdict import at_least
from cetane.pipeline import export

from .conftest import Cetane


def test_a_bundle_and_a_package(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    found = cetane("export", ported.path, "-o", tmp_path / "all", "--to", "onnx", "--json").json
    assert set(found["files"]) == {shard.name for shard in ported.plan.shards}
    assert found["passed"] and len(found["checks"]) == len(found["files"])
    for files in found["files"].values():
        for file in files:
            onnx.checker.check_model(str(tmp_path / "all" / file))
    package = ported.shard(ported.plan.shards[0].name)
    result = cetane("export", package, "-o", tmp_path / "one", "--to", "onnx")
    assert result.code == 0 and "functions" in result.out
    assert "onnxruntime on random inputs" in result.out


def test_what_is_there_stays(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = cetane("export", ported.path, "-o", tmp_path / "mine", "--to", "onnx")
    assert result.code == 2 and "exists" in result.err


@pytest.mark.parametrize("source", ["missing", "missing.mlpackage"])
def test_a_missing_source(cetane: Cetane, tmp_path: Path, source: str) -> None:
    result = cetane("export", tmp_path / source, "-o", tmp_path / "out", "--to", "onnx")
    assert result.code == 2 and len(result.err.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*tmp"))


def test_a_folder_for_your_own_app(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "my app"
    result = cetane("export", ported.path, "-o", out, "--layout", "contract")
    command = next(line for line in result.out.splitlines() if line.startswith("here: "))
    assert result.code == 0 and str(out / "host.py") in shlex.split(command)
    assert {path.name for path in out.iterdir()} >= {
        "CONTRACT.md", "contract.json", "host.py", "shards", "tokenizer",
    }  # fmt: skip
    result = cetane("push", out, "me/tiny", "--bundle", ported.path, "--dry-run")
    assert result.code == 0 and "nothing uploaded, dry run" in result.out
    *_, last = result.out.splitlines()
    push = ["cetane", "push", str(out), "me/tiny", "--bundle", str(ported.path)]
    assert shlex.split(last.removeprefix("next: ")) == push


def test_a_checkpoint_that_has_moved(
    cetane: Cetane, ported: Bundle, tmp_path: Path, tiny_checkpoint_folder: Path
) -> None:
    """The refusal names --model, and with it the folder is written."""
    bundle, moved = tmp_path / "bundle", tmp_path / "moved"
    shutil.copytree(ported.path, bundle)
    shutil.copytree(tiny_checkpoint_folder, moved)  # with its dates
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["source"] = str(tmp_path / "gone")
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    ask = ("export", bundle, "-o", tmp_path / "out", "--layout", "anemll")
    refused = cetane(*ask)
    assert refused.code == 2 and "--model MODEL" in refused.err
    undated = tmp_path / "undated"
    shutil.copytree(moved, undated, copy_function=shutil.copyfile)
    refused = cetane(*ask, "--model", undated)
    assert refused.code == 2 and "must keep the dates (cp -a, rsync -a)" in refused.err
    assert cetane(*ask, "--model", moved).code == 0
    asked = cetane("export", bundle, "-o", tmp_path / "c", "--to", "contract", "--model", moved)
    assert asked.code == 2 and "contract reads the bundle alone" in asked.err


def test_a_folder_for_anemll(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cetane("export", ported.path, "-o", out, "--layout", "anemll")
    assert result.code == 0 and "sh compile.sh" in result.out
    assert "played by ANEMLL's rules" in result.out and "not judged" not in result.out
    packages = len(list(out.glob("*.mlpackage")))
    right = cetane("validate", out)
    assert right.code == 0 and "not judged: logits: nothing ran its packages" in right.out
    assert right.out.startswith(f"ANEMLL's contract: pass, {packages} packages read\n")
    for option in ("--perplexity", "--layer", "--tokens", "--n-probes", "--model"):
        error = cetane("validate", out, option, 2).error
        assert error == f"{option} is for bundles, and this is an app's folder"
    (out / "tokenizer.json").unlink()
    result = cetane("validate", out, "--json")
    assert result.code == 1 and "tokenizer.json" in result.json["problems"][0]
    assert cetane("validate", out).out.startswith("ANEMLL's contract: FAIL")
    again = ("export", ported.path, "-o", out, "--layout", "anemll", "--package", "llama_lm_head")
    assert cetane(*again).code == 1  # the tokenizer is still away


def test_no_single_packages(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    result = cetane("export", ported.path, "-o", tmp_path, "--to", "onnx", "--package", "model")
    assert result.code == 2 and "--package is for anemll" in result.err


def test_one_form(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    assert cetane("export", ported.path, "-o", tmp_path / "out").code == 2


@pytest.mark.parametrize(("cosine", "code"), [(0.99999, 0), (0.5, 1)])
def test_core_ai_shows_the_verdict_of_apples_runtime(
    cetane: Cetane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cosine: float, code: int
) -> None:
    result = CoreAIResult(checks=(at_least("cosine after 3 tokens", cosine, 0.9999),))
    made = export.CoreAIFolder(tmp_path, "xcrun coreai-build", ["int4: slow"], result)
    monkeypatch.setattr(export, "export_coreai", lambda *_, **__: made)
    shown = cetane("export", "bundle", "-o", tmp_path, "--target", "coreai")
    assert shown.code == code and "cosine after 3 tokens" in shown.out
    assert "not run on a device" in shown.out and "xcrun coreai-build" in shown.out
    assert "warning: int4: slow" in shown.err
    content = cetane("export", "bundle", "-o", tmp_path, "--to", "coreai", "--json").json
    assert content["passed"] is (code == 0) and content["checks"][0]["value"] == cosine
