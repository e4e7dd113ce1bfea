"""The validator of the published ports: shards alone, on ids that are fit to judge them on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model
from tests.peft_folders import save_adapter

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.gates.layers import LayersResult, ProbedShard, judge_layers, screen
from cetane.pipeline.origin import checkpoint_of

ROWS = np.ones((100, 4), np.float32)
ROWS[[42, 77]] *= 0.1
"""Two embeddings of unusually small norm."""


def run(bundle: Bundle, checkpoint: Checkpoint, block: int | None = None, *ids: int,
        probes: int = 1) -> LayersResult:  # fmt: skip
    return judge_layers(bundle, checkpoint, block, ids, probes, lambda *_: None)


def test_every_shard_of_a_right_port(good: Bundle, checkpoint: Checkpoint) -> None:
    result = run(good, checkpoint, probes=2)
    assert result.passed
    assert [score.shard for score in result.shards] == ["chunk-00"]
    assert len(set(result.probes)) == 2
    score = result.shards[0]
    assert 0.999 < score.min <= score.mean <= 1
    assert result.line == f"PASS 1/1, mean {score.mean:.6f}, min {score.min:.6f}"


def test_the_shard_of_a_block_on_a_users_ids(bad: Bundle, checkpoint: Checkpoint) -> None:
    """Which a row of wrong weights spoils."""
    result = run(bad, checkpoint, 1, 20, 30, 40)
    assert result.probes == ((20, 30, 40),)
    assert not result.passed
    assert result.line.startswith("FAIL 0/1, mean 0.")


def test_an_adapter_that_is_another(adapted: Any, tmp_path: Path) -> None:
    """The base is right, and so are the functions of the other adapter."""
    assert run(adapted.bundle, checkpoint_of(adapted.bundle)).passed
    save_adapter(tmp_path, build_model("llama"), seed=3, target_modules="all-linear", r=3)
    other = checkpoint_of(adapted.bundle, adapters={"plain": tmp_path})
    assert run(adapted.bundle, other).shards[0].min < 0.9


@pytest.mark.parametrize(("block", "ids"), [(2, ()), (-1, ()), (None, (288,)), (None, (5,) * 300)])
def test_what_there_is_not(
    block: int | None, ids: tuple[int, ...], good: Bundle, checkpoint: Checkpoint
) -> None:
    with pytest.raises(CetaneError):
        run(good, checkpoint, block, *ids)


def test_ids_are_screened_with_reasons() -> None:
    """BOS where it is first, and rows of small norm (ane-book, experiments 30 and 31)."""
    kept, left_out = screen([2, 42, 10, 77, 42, 2], ROWS, bos=2)
    assert kept == (10,)
    assert {one.token for one in left_out} == {2, 42, 77}
    reasons = {one.token: one.reason for one in left_out}
    assert "BOS" in reasons[2]
    assert "norm of 0.2" in reasons[42]
    assert screen([10, 2, 11], ROWS, bos=2) == ((10, 2, 11), [])


def test_no_id_is_left() -> None:
    with pytest.raises(CetaneError, match=r"no token is left.*42: its embedding"):
        screen([42], ROWS, bos=None)


def test_the_line_counts() -> None:
    """As the published validator writes it: PASS n/n, mean, min."""
    scores = tuple(
        ProbedShard(shard=str(i), passed=i > 0, mean=0.99, min=0.9 + i / 100) for i in range(4)
    )
    result = LayersResult(passed=False, limit=0.91, shards=scores, probes=(), screened=())
    assert result.line == "FAIL 3/4, mean 0.990000, min 0.900000"
