"""Scores are figures that JSON has."""

import json

import numpy as np
import pytest

from cetane.engine.backend import Array
from cetane.gates.metrics import WORST
from cetane.gates.reference import Observed
from cetane.gates.scores import LogitScore, ShardScore, logit_score, shard_score

ROWS = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)


def of_logits(ours: Array) -> LogitScore:
    return logit_score("decode", [Observed(ours, {})], [Observed(ROWS, {})], slice(None))


def of_shard(*ours: Array) -> ShardScore:
    pairs = [(probe, ROWS) for probe in ours]
    return shard_score("s", "hidden", ("layers.0", 0), "decode", pairs)


def test_a_head_that_chooses() -> None:
    """It gives one logit a token: there is no distribution."""
    ours = np.full_like(ROWS, -np.inf)
    np.put_along_axis(ours, ROWS.argmax(1)[:, None], 1.0, axis=1)
    found = of_logits(ours)
    assert (found.psnr, found.kl, found.kl_max) == (-WORST, WORST, WORST)
    assert (found.top1, found.best) == (1, 1)
    json.dumps(found.model_dump(), allow_nan=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite(value: float) -> None:
    """It outweighs tokens that are exact, and other probes."""
    ours = ROWS.copy()
    ours[1, 2] = value
    with np.errstate(invalid="ignore"):
        logits = of_logits(ours)
    assert (logits.psnr, logits.kl, logits.kl_max) == (-WORST, WORST, WORST)
    assert of_shard(ours, ROWS).psnr == of_shard(ROWS, ours).psnr == -WORST


def test_an_exact_port() -> None:
    assert of_shard(ROWS).psnr == of_logits(ROWS).psnr == WORST
    assert of_logits(ROWS).kl_max == 0
