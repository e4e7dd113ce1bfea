"""Every adapter of a bundle is judged against the model that peft merges."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import build_model
from tests.peft_folders import save_adapter

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.bases import base_checks, unknown_bases
from cetane.gates.explain import explain
from cetane.gates.golden import golden
from cetane.gates.golden_result import GoldenResult
from cetane.gates.port import packaged
from cetane.gates.reference import Reference
from cetane.gates.static import static_checks
from cetane.gates.verdict import Check
from cetane.gates.weights import wrong_weights
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import Planner


def run(adapted: Any, checkpoint: Any) -> GoldenResult:
    return golden(adapted.bundle, checkpoint, lambda *_: None, prompts=0)


@pytest.fixture(scope="module")
def result(adapted: Any) -> GoldenResult:
    return run(adapted, checkpoint_of(adapted.bundle))


def test_a_right_bundle_passes(result: GoldenResult, adapted: Any) -> None:
    assert result.passed, [check for check in result.checks if not check.passed]
    assert result.adapters.keys() == {"plain", "dora"}
    assert {own.loader for own in result.adapters.values()} == {"transformers and peft"}
    names = {check.name for check in result.checks}
    for adapter in ("plain", "dora"):
        for mode in ("decode", "prefill"):
            assert f"{adapter}: structure: logits of head-0 ({mode})" in names
            assert f"{adapter}: fp16: KL ({mode})" in names
        assert any(name.startswith(f"{adapter}: compression") for name in names)
    assert static_checks(adapted.bundle) == []


@pytest.fixture
def elsewhere(adapted: Any, tmp_path: Path) -> Path:
    """A base of the same shapes with other weights."""
    folder = tmp_path / "elsewhere"
    shutil.copytree(adapted.base, folder)
    model = build_model("llama")
    for parameter in model.parameters():
        parameter.data *= 1.1
    model.save_pretrained(folder)
    return folder


def test_another_base_is_red(adapted: Any, elsewhere: Path) -> None:
    """Weights of the base are others, and so is what DoRA divides by their lengths."""
    checkpoint = checkpoint_of(adapted.bundle, elsewhere)
    port = packaged(adapted.bundle, Planner(checkpoint, adapted.bundle.plan.recipe), checkpoint)
    wrong = {one.parameter for one in wrong_weights(port, checkpoint)}
    query = "model.layers.0.self_attn.q_proj.weight"
    assert {query, f"dora:{query}:factor", "lm_head.weight"} <= wrong
    assert not any(name.endswith((":up", ":down")) for name in wrong)


def test_another_adapter_is_red(adapted: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    save_adapter(folder, build_model("llama"), seed=7, target_modules="all-linear", r=3)
    checkpoint = checkpoint_of(adapted.bundle, adapters={"plain": folder})
    port = packaged(adapted.bundle, Planner(checkpoint, adapted.bundle.plan.recipe), checkpoint)
    wrong = {one.parameter for one in wrong_weights(port, checkpoint)}
    assert len(wrong) == 2 * 7 * 2  # up and down of 7 projections in 2 layers
    assert all(name.startswith("plain:") for name in wrong)


def stating(folder: Path, base: Path | str | None, target: Path) -> Path:
    """A copy of an adapter whose config states a base."""
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None if base is None else str(base)
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("own", [True, False])
def test_the_stated_base_is_compared(
    own: bool, adapted: Any, elsewhere: Path, tmp_path: Path
) -> None:
    stated = adapted.base if own else elsewhere
    folder = stating(adapted.folders["plain"], stated, tmp_path / "lora")
    for checkpoint, name in (
        (open_checkpoint(adapted.base, adapters={"sql": folder}), "sql"),
        (open_checkpoint(adapted.base, lora=folder), "lora"),
    ):
        (check,) = base_checks(checkpoint)
        assert check.name == f"{name}: weights of its stated base"
        assert check.passed == own
        assert list(unknown_bases(checkpoint)) == []
    assert check.value == pytest.approx(0.0 if own else 0.1 / 1.1, abs=1e-3)


def test_an_unknown_base_is_a_warning(adapted: Any, tmp_path: Path) -> None:
    folder = stating(adapted.folders["plain"], "nobody/nothing-at-all", tmp_path / "lora")
    checkpoint = open_checkpoint(adapted.base, adapters={"sql": folder})
    assert list(base_checks(checkpoint)) == []
    (warning,) = unknown_bases(checkpoint)
    assert "nobody/nothing-at-all" in warning


def test_only_an_adapter_may_be_red(adapted: Any, result: GoldenResult) -> None:
    bad = Check(name="structure: logits of head-0 (decode)", value=1, limit=0, passed=False)
    own = result.adapters["dora"]
    red = own.model_copy(update={"passed": False, "checks": (*own.checks, bad)})
    named = bad.model_copy(update={"name": f"dora: {bad.name}"})
    off = own.structure[0].model_copy(update={"relative": 1.0})
    red = red.model_copy(update={"structure": (off, *own.structure[1:])})
    whole = result.model_copy(
        update={
            "passed": False,
            "checks": (*result.checks, named),
            "adapters": result.adapters | {"dora": red},
        }
    )
    said = explain(adapted.bundle, checkpoint_of(adapted.bundle), whole)
    assert said is not None
    assert said.cause == "conversion"
    assert said.sentence.startswith("With the adapter dora: ")


def test_without_its_adapters_nothing_is_judged(adapted: Any) -> None:
    with pytest.raises(CetaneError, match="has the adapters dora, plain"):
        run(adapted, open_checkpoint(adapted.base))


def test_the_reference_merges_by_peft(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = open_checkpoint(adapted.base, lora=adapted.folders["dora"])
    by_peft = Reference(merged)
    assert by_peft.loader == "transformers and peft"
    monkeypatch.setitem(sys.modules, "peft", None)
    by_us = Reference(merged)
    assert by_us.loader == "cetane"
    tokens = [5, 9, 200, 31]
    ours, theirs = (one.run([tokens])[0].logits for one in (by_us, by_peft))
    assert abs(ours - theirs).max() < 1e-5
