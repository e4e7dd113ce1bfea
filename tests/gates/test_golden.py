"""The golden gate is green for a right port and red for a wrong one."""

import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.gates.golden import (
    GoldenResult,
    LogitScore,
    ShardScore,
    golden,
    judge,
    observe,
    shard_scores,
    thresholds,
)
from cetane.gates.probes import Probe
from cetane.gates.reference import Reference
from cetane.planner import Planner
from cetane.schema.plan import Plan

from .conftest import ROUTED, changed, zaya_recipe


def run(bundle: Bundle, checkpoint: Checkpoint, **options: Any) -> GoldenResult:
    return golden(bundle, checkpoint, lambda *_: None, greedy_tokens=12, **options)


@pytest.fixture(scope="module")
def result(good: Bundle, tiny_checkpoint_folder: Path) -> GoldenResult:
    return run(good, open_checkpoint(tiny_checkpoint_folder))


def test_a_right_port_passes(result: GoldenResult) -> None:
    assert result.passed
    assert all(check.passed for check in result.checks)
    assert result.greedy == (1.0, 1.0)
    assert {score.mode for score in result.logits} == {"decode", "prefill"}
    assert result.warnings == ()
    assert [(s.shard, s.tensor, s.truth, s.mode) for s in result.shards] == [
        ("chunk-00", "hidden", "model.layers.1", "decode"),
        ("chunk-00", "hidden", "model.layers.1", "prefill"),
    ]


def test_the_figures_are_those_of_fp16(result: GoldenResult) -> None:
    """Rounding shows, and only rounding."""
    for score in result.logits:
        assert 0 < score.kl <= score.kl_max < 1e-3
        assert 0.9999 < score.cosine_min < 1
        assert 40 < score.psnr < 100


def test_a_wrong_weight_fails(bad: Bundle, checkpoint: Checkpoint) -> None:
    found = run(bad, checkpoint)
    assert not found.passed
    failed = [check.name for check in found.checks if not check.passed]
    assert any(name.startswith("hidden cosine (chunk-00") for name in failed)
    assert "KL (decode)" in failed
    assert "KL (prefill)" in failed


def test_a_wrong_port_passes_beside_its_own_checkpoint(bad: Bundle) -> None:
    """The gate judges the port: the checkpoint is right by definition."""
    assert run(bad, open_checkpoint(bad.manifest.source), prompts=1).passed


def test_probes_go_past_the_prefill_length(good: Bundle, result: GoldenResult) -> None:
    widest = max(mode.tokens for mode in good.plan.modes.values())
    assert result.probes.keys() == {"random-1", "text"}
    for tokens in result.probes.values():
        assert widest + 1 < len(tokens) <= good.plan.recipe.cache.context
        assert len(tokens) % widest
        assert not set(tokens) & set(good.tokenizer.eos_ids)


def test_a_context_too_small_for_the_questions(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    """They are cut, for the port and for the truth alike."""
    small = tiny_bundle(verify=None, prefill=None, layout={"kind": "per-block"}, context=32)
    found = run(small, checkpoint)
    assert found.passed
    assert found.greedy == (1.0, 1.0)


def test_logit_figures_by_hand(
    good: Bundle, result: GoldenResult, truth: transformers.PreTrainedModel
) -> None:
    """KL of the portable fp16 logits of the decode function against transformers, with torch."""
    engine = Engine(good.plan, PortableBackend(good, "fp16"), good.tables())
    losses = []
    for tokens in result.probes.values():
        found = torch.tensor(engine.session(["decode"]).feed(tokens, "all")).double()
        with torch.inference_mode():
            expected = truth(torch.tensor([tokens])).logits[0].double()
        losses.append(
            torch.nn.functional.kl_div(
                found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
            ).sum(-1)
        )
    (decode,) = [score for score in result.logits if score.mode == "decode"]
    np.testing.assert_allclose(decode.kl, torch.cat(losses).mean(), rtol=1e-2)
    np.testing.assert_allclose(decode.kl_max, torch.cat(losses).max(), rtol=1e-2)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are opened in fp16, in order; fails when one is while another is there."""
    names: list[str] = []
    alive: list[weakref.ref[Any]] = []
    opens = PortableBackend.open

    def spy(self: PortableBackend, shard: str) -> Any:
        if self.precision == "fp32":
            return opens(self, shard)
        assert [ref for ref in alive if ref() is not None] == []
        program = opens(self, shard)
        names.append(shard)
        alive.extend([weakref.ref(program), weakref.ref(program.program)])
        return program

    monkeypatch.setattr(PortableBackend, "open", spy)
    return names


ZAYA_SHARDS = {
    "dense": [
        ("attn-00", "hidden", "model.layers.0.post_attention_residual_scale"),
        ("moe-00", "hidden", "model.layers.0"),
        ("moe-00", "router", "model.layers.0"),
        ("attn-01", "hidden", "model.layers.1.post_attention_residual_scale"),
        ("moe-01", "hidden", "model.layers.1"),
    ],
    "routed": [
        ("layer-00", "hidden", "model.layers.0.post_attention_residual_scale"),
        ("layer-00", "router", "model.layers.0"),
        ("layer-00", "hidden", "model.layers.0"),
        ("layer-01", "hidden", "model.layers.1.post_attention_residual_scale"),
        ("layer-01", "hidden", "model.layers.1"),
    ],
}
"""What every shard hands on when it decodes, in the order of the calls."""


@pytest.mark.parametrize(("kind", "options"), [("dense", {}), ("routed", ROUTED)])
def test_a_zaya_passes(
    kind: str,
    options: dict[str, Any],
    zaya_bundle: Callable[..., Bundle],
    zaya_checkpoint: Checkpoint,
    opened: list[str],
) -> None:
    """Its hidden states and its routers' states, with one shard in memory at a time."""
    bundle = zaya_bundle(**options)
    opened.clear()
    found = run(bundle, zaya_checkpoint, prompts=1)
    assert found.passed, found.checks
    assert found.greedy == (1.0,)
    assert opened == [shard.name for shard in bundle.plan.shards]
    scored = {
        mode: [(s.shard, s.tensor, s.truth) for s in found.shards if s.mode == mode]
        for mode in bundle.plan.modes
    }
    expected = {"decode": ZAYA_SHARDS[kind]}
    if kind == "routed":  # and in prefill all experts are one call
        expected["prefill"] = [
            ("layer-00", "hidden", "model.layers.0"),
            ("layer-00", "router", "model.layers.0"),
            ("layer-01", "hidden", "model.layers.1"),
        ]
    assert scored == expected
    for score in found.shards:
        assert 0.9999 < score.cosine_min <= score.cosine < 1  # rounded, so not the truth itself
    judged = {check.name for check in found.checks}
    assert {f"router cosine ({opened[1 if kind == 'dense' else 0]})"} == {
        name for name in judged if name.startswith("router")
    }


def test_a_departure_fails(departed: Bundle, zaya_checkpoint: Checkpoint) -> None:
    """What ZAYA does not do is found in the block that does it, and after it."""
    found = run(departed, zaya_checkpoint, prompts=0)
    assert not found.passed
    failed = {check.name for check in found.checks if not check.passed}
    assert {"hidden cosine (attn-00)", "hidden cosine (moe-01)", "KL (decode)"} <= failed


def test_ranges(
    zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint, zaya_model: Any
) -> None:
    """The largest magnitudes of the model itself, by block."""
    found = run(zaya_bundle(), zaya_checkpoint, prompts=0)
    seen: dict[str, float] = dict.fromkeys(("attn-00", "moe-00", "attn-01", "moe-01"), 0.0)

    def note(block: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen[block] = max(seen[block], float(hidden.abs().max()))

        return hook

    layers = zaya_model.model.layers
    modules = [m for x in layers for m in (x.post_attention_residual_scale, x)]
    hooks = [m.register_forward_hook(note(b)) for m, b in zip(modules, seen, strict=True)]
    with torch.inference_mode():
        for tokens in found.probes.values():
            zaya_model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert {found.block: found.largest for found in found.ranges} == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize(("largest", "warned"), [(30_000, False), (36_000, True), (80_000, True)])
def test_a_residual_stream_near_the_limit_of_fp16(
    largest: float,
    warned: bool,
    zaya_bundle: Callable[..., Bundle],
    zaya_folder: Path,
    tmp_path: Path,
) -> None:
    """Of the model: the embedding's affine sets the scale of what follows."""
    channel = 3
    scale, bias = (f"model.input_hidden_states_{what}" for what in ("scale", "bias"))

    def raise_one_channel(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if "residual_scale.residual_scale" in name or "residual_scale.residual_bias" in name:
                weights[name].fill_(float("scale.residual_scale" in name))
        weights[scale].fill_(1)
        weights["model.embed_tokens.weight"][:, channel] = 0
        weights[bias][channel] = largest

    folder = changed(zaya_folder, tmp_path / "zaya", raise_one_channel)
    found = run(zaya_bundle(), open_checkpoint(folder), prompts=0)
    assert found.ranges[0].largest == pytest.approx(largest, rel=0.01)
    said = [warning for warning in found.warnings if warning.startswith("attn-00: ")]
    assert bool(said) is warned
    if warned:
        assert "the residual stream reaches" in said[0]
        assert "65504" in said[0]


def test_a_model_too_large_to_decode(
    good: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding would need all of it in memory: it is left out, and that is said."""
    monkeypatch.setattr("cetane.gates.golden.RESIDENT", 1000)
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 1000)
    found = run(good, checkpoint)
    assert found.passed
    assert found.greedy == ()
    assert not [check for check in found.checks if check.name.startswith("greedy")]
    (warning,) = found.warnings
    assert warning.startswith("greedy decoding was left out")


@pytest.mark.parametrize("contract", ["shift", "readonly"])
@pytest.mark.parametrize("routed", ["decode", "prefill"])
def test_a_tensor_that_only_some_calls_hand_on(
    contract: str, routed: str, zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """Where experts are routed to, a shard hands on more: what is compared is of all tokens."""
    checkpoint = in_memory(zaya_model)
    recipe = zaya_recipe(
        cache={"contract": contract, "context": 64},
        layout={"kind": "per-layer", "routed": [routed]},
        tokens={"verify": 0, "prefill": 8},
    )
    planner = Planner(checkpoint, recipe)
    probe = Probe("x", tuple(range(20, 34)))  # one call of 8, and 6 more tokens
    found = observe(authored_engine(planner, checkpoint), planner, ["decode", "prefill"], [probe])
    for mode, (observed,) in found.items():
        assert {len(rows) for rows in observed.tensors.values()} == {14}
        truths = Reference(checkpoint).run([probe.tokens], list(observed.tensors))
        scores = list(shard_scores(planner, mode, [observed], truths))
        assert {score.shard for score in scores} == {"layer-00", "layer-01"}
        assert all(score.cosine_min > 1 - 1e-5 for score in scores)


def with_bits(plan: Plan, bits: int) -> Plan:
    return plan.model_copy(update={"mean_bits": bits})


def test_thresholds_are_chosen_by_bits(good: Bundle) -> None:
    """Rounded down to a row of the table, and fewer bits are never held to more."""
    by_bits = {bits: thresholds(with_bits(good.plan, bits)) for bits in (1, 2, 3, 4, 6, 8, 16)}
    assert by_bits[1] == by_bits[2] == by_bits[3]
    distinct = [by_bits[bits] for bits in (1, 4, 6, 8, 16)]
    for looser, stricter in pairwise(distinct):
        assert looser["kl"] > stricter["kl"]
        for name in ("hidden_cosine", "top1", "top5", "greedy"):
            assert looser[name] < stricter[name] <= 1
    assert thresholds(good.plan) == by_bits[16]


GOOD_SHARD = ShardScore(
    shard="s", tensor="hidden", truth="a.b", mode="decode", cosine=1, cosine_min=1, psnr=90
)
GOOD_LOGITS = LogitScore(
    mode="decode", cosine=1, cosine_min=1, psnr=90, kl=0, kl_max=0, top1=1, top5=1
)


@pytest.mark.parametrize(
    ("shard", "logits", "greedy", "failed"),
    [
        ({}, {}, (1.0, 1.0), []),
        ({}, {}, (), []),
        ({"cosine": 0.9998}, {}, (), ["hidden cosine (s)"]),
        ({"cosine": 0.9998, "mode": "prefill"}, {}, (), ["hidden cosine (s)"]),
        ({"cosine": 0.9998, "tensor": "router"}, {}, (), ["router cosine (s)"]),
        ({}, {"kl": 0.0021}, (), ["KL (decode)"]),
        ({}, {"kl": float("nan")}, (), ["KL (decode)"]),
        ({}, {"cosine": 0.9998}, (), ["logit cosine (decode)"]),
        ({}, {"psnr": 49.0}, (), ["logit PSNR dB (decode)"]),
        ({}, {"top1": 0.96}, (), ["top-1 agreement (decode)"]),
        ({}, {"top5": 0.99}, (), ["top-5 containment (decode)"]),
        ({}, {}, (1.0, 0.99), ["greedy tokens (worst prompt)"]),
    ],
)
def test_every_check_can_fail(
    good: Bundle,
    shard: dict[str, Any],
    logits: dict[str, float],
    greedy: tuple[float, ...],
    failed: list[str],
) -> None:
    scores = [GOOD_SHARD, GOOD_SHARD.model_copy(update=shard)]
    rows = [GOOD_LOGITS.model_copy(update=logits)]
    checks = list(judge(good.plan, scores, rows, greedy))
    assert [check.name for check in checks if not check.passed] == failed
