"""The golden gate is green for a right port and red for a wrong one."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.gates.golden import (
    GoldenResult,
    LogitScore,
    ShardScore,
    golden,
    judge,
    thresholds,
)
from cetane.plan import Plan


def run(bundle: Bundle, checkpoint: Checkpoint, **options: Any) -> GoldenResult:
    return golden(bundle, checkpoint, lambda *_: None, greedy_tokens=12, **options)


@pytest.fixture(scope="module")
def result(good: Bundle, tiny_checkpoint_folder: Any) -> GoldenResult:
    from cetane.checkpoint import open_checkpoint

    return run(good, open_checkpoint(tiny_checkpoint_folder))


def test_a_right_port_passes(result: GoldenResult) -> None:
    assert result.passed
    assert all(check.passed for check in result.checks)
    assert result.greedy == (1.0, 1.0)
    assert {score.mode for score in result.logits} == {"decode", "prefill"}
    assert [(s.shard, s.mode) for s in result.shards] == [
        ("chunk-00", "decode"), ("chunk-00", "prefill"),
    ]  # fmt: skip


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
    from cetane.checkpoint import open_checkpoint

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
    small = tiny_bundle(verify=None, context=32)
    found = run(small, checkpoint)
    assert found.passed
    assert found.greedy == (1.0, 1.0)


def test_logit_figures_by_hand(
    good: Bundle, result: GoldenResult, truth: transformers.PreTrainedModel
) -> None:
    """KL of the portable fp16 logits of the decode function against transformers, with torch."""
    from cetane.engine.engine import Engine
    from cetane.engine.portable import PortableBackend

    engine = Engine(good.plan, PortableBackend(good, "fp16"), good.tables(), ["decode"])
    losses = []
    for tokens in result.probes.values():
        found = torch.tensor(engine.session().feed(tokens, "all")).double()
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


GOOD_SHARD = ShardScore(shard="s", mode="decode", cosine=1, cosine_min=1, psnr=90)
GOOD_LOGITS = LogitScore(
    mode="decode", cosine=1, cosine_min=1, psnr=90, kl=0, kl_max=0, top1=1, top5=1
)


@pytest.mark.parametrize(
    ("shard", "logits", "greedy", "failed"),
    [
        ({}, {}, (1.0, 1.0), []),
        ({}, {}, (), []),
        ({"cosine": 0.9998}, {}, (), ["hidden cosine (s)"]),
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
    shard: dict[str, float],
    logits: dict[str, float],
    greedy: tuple[float, ...],
    failed: list[str],
) -> None:
    scores = [GOOD_SHARD, GOOD_SHARD.model_copy(update=shard)]
    rows = [GOOD_LOGITS.model_copy(update=logits)]
    checks = list(judge(good.plan, scores, rows, greedy))
    assert [check.name for check in checks if not check.passed] == failed
