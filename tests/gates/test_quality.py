"""Perplexity, beside a computation with transformers alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.gates.limits import limits
from cetane.gates.quality import Agreement, TextQuality, perplexity, read_tokens

TOKENS = [int(t) for t in np.random.default_rng(9).integers(1, 288, 64 + 33)]
"""A whole context, and a shorter window after it."""


def run(bundle: Bundle, checkpoint: Checkpoint, tokens: list[int]) -> TextQuality:
    return perplexity(bundle, checkpoint, tokens, lambda *_: None)


def by_hand(model: transformers.PreTrainedModel, windows: list[list[int]]) -> float:
    losses = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window])
            losses.append(model(ids, labels=ids).loss * (len(window) - 1))
    return float(torch.exp(sum(losses) / sum(len(window) - 1 for window in windows)))


def test_perplexity(
    good: Bundle, checkpoint: Checkpoint, truth: transformers.PreTrainedModel
) -> None:
    found = run(good, checkpoint, TOKENS)
    expected = by_hand(truth, [TOKENS[:64], TOKENS[64:]])
    assert found.tokens == 63 + 32
    assert found.reference_perplexity == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(expected, rel=1e-3)
    assert found.perplexity != found.reference_perplexity
    assert found.ratio == pytest.approx(found.perplexity / found.reference_perplexity)
    assert 0 <= found.kl < 1e-4
    assert found.top1 > 0.95
    assert found.passed
    assert found.fingerprint == checkpoint.fingerprint


def test_perplexity_of_a_wrong_port(bad: Bundle, checkpoint: Checkpoint) -> None:
    found = run(bad, checkpoint, TOKENS)
    assert found.kl > 0.01
    assert abs(found.ratio - 1) > 1e-3


def test_perplexity_has_a_limit(
    good: Bundle, checkpoint: Checkpoint, asked: Callable[..., None]
) -> None:
    asked("quality.good", perplexity_ratio=0.5)
    found = run(good, checkpoint, TOKENS)
    assert not found.passed
    assert found.limit == 0.5


def test_a_last_window_of_one_token_predicts_nothing(good: Bundle, checkpoint: Checkpoint) -> None:
    assert run(good, checkpoint, TOKENS[:65]).tokens == 63
    assert run(good, checkpoint, TOKENS[:2]).tokens == 1


def test_read_tokens(good: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The cetane number of a fuel.", encoding="utf-8")
    everything = good.tokenizer.encode("The cetane number of a fuel.")
    assert read_tokens(good.tokenizer, file, 1000) == everything
    assert read_tokens(good.tokenizer, file, 3) == everything[:3]


def test_a_text_without_end(good: Bundle) -> None:
    with pytest.raises(CetaneError, match="not a regular file"):
        read_tokens(good.tokenizer, Path("/dev/zero"), 10)


@pytest.mark.parametrize(
    ("content", "limit"), [(b"", 10), (b"x", 10), (b"a text", 1), (b"\xff\xfe\xfa", 10), (None, 10)]
)
def test_a_text_that_cannot_be_measured(
    good: Bundle, tmp_path: Path, content: bytes | None, limit: int
) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CetaneError, match=r"text\.txt"):
        read_tokens(good.tokenizer, file, limit)


def test_a_model_that_is_less_sure_is_another_one(good: Bundle) -> None:
    """It finds a random text likelier."""
    drawn = np.random.default_rng(0)
    theirs = 3 * drawn.standard_normal((40, 288), dtype=np.float32)
    for ours, passed in ((theirs, True), (0.1 * theirs, False)):
        agreement = Agreement(good.plan.recipe, np.arange(288), 288)
        agreement.add(ours, theirs, drawn.integers(0, 288, 40))
        found = agreement.quality("x", limits().quality["good"])
        assert found.ratio <= 1
        assert found.passed is passed


@pytest.mark.parametrize("of", ["both", "the port"])
def test_what_is_not_a_number_never_passes(of: str, good: Bundle) -> None:
    """Even where both sides are not: then their ratio is 1."""
    logits = np.zeros((3, 288), np.float32)
    broken = np.full_like(logits, np.nan)
    agreement = Agreement(good.plan.recipe, np.arange(288), 288)
    with np.errstate(invalid="ignore"):
        agreement.add(broken, broken if of == "both" else logits, np.array([1, 2, 3]))
    found = agreement.quality("x", limits().quality["good"])
    assert not found.passed
    assert np.isfinite(found.kl)
