"""Figures of a bundle with quantized activations, against the Hugging Face model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_model

from cetane.activations import NAIVE, measure, measure_activations
from cetane.activations.measure import LIMIT
from cetane.activations.quantize import Quantized
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.portable import CompiledProgram
from cetane.errors import CetaneError
from cetane.gates.activations import ActivationScores, Score, judge, judge_score
from cetane.gates.scores import LogitScore

TEXTS = [np.random.default_rng(seed).integers(1, 288, 30).tolist() for seed in (1, 2)]


def silent(*_: Any) -> None:
    pass


@torch.inference_mode()
def perplexity() -> float:
    """Of the texts, by transformers."""
    model = build_model("llama")
    losses = [float(model(torch.tensor([t]), labels=torch.tensor([t])).loss) for t in TEXTS]
    return float(np.exp(np.mean(losses)))


def test_scores_are_against_the_model(
    bundle: Bundle, made: tuple[Bundle, Quantized], tiny_checkpoint: Checkpoint
) -> None:
    scores = judge({"w8": bundle, "w8a8": made[0]}, tiny_checkpoint, TEXTS, silent)
    assert scores.tokens == 58
    assert scores.reference_perplexity == pytest.approx(perplexity(), rel=1e-4)
    before, after = scores.bundles["w8"], scores.bundles["w8a8"]
    assert [score.shard for score in after.shards] == [bundle.plan.shards[0].name]
    assert 0.97 < after.cosine < before.cosine < 1
    assert before.perplexity == pytest.approx(scores.reference_perplexity, rel=0.02)
    assert after.perplexity == pytest.approx(before.perplexity, rel=0.1)
    assert before.logits.kl < after.logits.kl < 0.1


@pytest.mark.parametrize(
    ("changes", "red"),
    [
        ({"kl": 0.16}, ["good: KL"]),
        ({"cosine": 0.94}, ["least mean cosine"]),
        ({}, ["good: perplexity ratio"]),
    ],
)
def test_the_gate_asks_the_promise(changes: dict[str, float], red: list[str]) -> None:
    """A KL of 0.15, and a perplexity 1.1 times the model's."""
    right = LogitScore(
        mode="prefill", cosine=0.99, cosine_min=0.9, psnr=30, kl=0.14, kl_max=1, top1=1, top5=1
    )
    score = Score(
        shards=(), logits=right.model_copy(update=changes), perplexity=10.9 if changes else 11.1
    )
    scores = ActivationScores(tokens=9, reference_perplexity=10, bundles={"it": score})
    checks = judge_score(scores, "it", "good")
    assert [check.name for check in checks if not check.passed] == red


def test_a_scaled_stream_is_as_near_to_the_model(
    bundle: Bundle, tiny_bundle: Callable[..., Bundle], tiny_checkpoint: Checkpoint
) -> None:
    half = tiny_bundle(verify=None, layout={"kind": "chunks", "chunks": 1},
                       compression={"default": "int8-per-channel"},
                       family={"residual_scale": 0.5})  # fmt: skip
    scores = judge({"it": bundle, "half": half}, tiny_checkpoint, TEXTS, silent).bundles
    (whole,), (scaled,) = scores["it"].shards, scores["half"].shards
    assert scaled.psnr == pytest.approx(whole.psnr, abs=1)
    assert scaled.cosine == pytest.approx(whole.cosine, abs=1e-3)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_head_that_is_wrong_fails_the_gate(
    mode: str, bundle: Bundle, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in one mode. Its shard hands on no hidden state; the layers before it are as they
    were."""

    def run(self: CompiledProgram, function: str, inputs: Any, state: Any) -> Any:
        made = call(self, function, inputs, state)
        wrong = function == mode
        return {name: -x if wrong and name.startswith("logits") else x for name, x in made.items()}

    call = CompiledProgram.call
    right = judge({"it": bundle}, tiny_checkpoint, TEXTS, silent).bundles["it"]
    monkeypatch.setattr(CompiledProgram, "call", run)
    wrong = judge({"it": bundle}, tiny_checkpoint, TEXTS, silent).bundles["it"]
    assert wrong.shards == right.shards
    assert right.cosine > 0.99
    assert wrong.cosine == pytest.approx(-right.logits.cosine, rel=0.01)


def test_one_shard_that_hands_on_nothing(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint: Checkpoint
) -> None:
    whole = tiny_bundle(layout={"kind": "single", "head": "last"})
    score = judge({"it": whole}, tiny_checkpoint, TEXTS, silent).bundles["it"]
    assert score.shards == ()
    assert 0.9999 < score.cosine < 1


def test_naive_calibration_fails_the_gate(
    bundle: Bundle, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Random numbers of 0.1 have not the ranges of the model: what is beyond them is cut off."""
    target = tmp_path / "a8"
    outcome = measure_activations(bundle, tiny_checkpoint, NAIVE, TEXTS, target, silent)
    assert not outcome.passed and outcome.after.cosine < LIMIT == outcome.limit
    assert outcome.before.cosine > 0.99
    stored = json.loads((target / "gates" / "activations.json").read_text())
    assert stored["passed"] is False
    assert stored["made"]["options"] == NAIVE.model_dump()
    assert Bundle(target).gates()["activations"]["after"] == outcome.after.model_dump(mode="json")
    assert outcome.made.samples == 2  # the last of a shard's five
    assert outcome.bytes_after > outcome.bytes_before


def test_a_bundle_that_is_not_judged_is_not_there(
    bundle: Bundle, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the same command begins again; it refused its own work."""

    def stopped(*_: Any) -> None:
        assert not (tmp_path / "a8").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "judge", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure_activations(bundle, tiny_checkpoint, NAIVE, TEXTS, tmp_path / "a8", silent)
    assert not list(tmp_path.iterdir())


def test_a_head_that_chooses_has_no_perplexity(
    bundle: Bundle, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bundle.plan
    head = plan.recipe.head.model_copy(update={"choose": True})
    recipe = plan.recipe.model_copy(update={"head": head})
    chooses = Bundle(bundle.path)
    chooses.manifest = chooses.manifest.model_copy(
        update={"plan": plan.model_copy(update={"recipe": recipe})}
    )
    with pytest.raises(CetaneError, match="gives choices"):
        judge({"it": chooses}, tiny_checkpoint, TEXTS, silent)
    monkeypatch.setattr(measure, "quantized", None)  # it is refused before any work
    with pytest.raises(CetaneError, match="gives choices"):
        measure_activations(chooses, tiny_checkpoint, NAIVE, TEXTS, tmp_path / "a8", silent)
