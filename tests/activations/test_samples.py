"""Real samples: the engine's own calls, at real positions, without padding."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from cetane.activations.samples import (
    CALIBRATING,
    RANDOM_CALLS,
    SPREAD,
    TAIL,
    Traces,
    conversations,
    held_out,
    prompts,
    random_samples,
)
from cetane.bundle import Bundle
from cetane.prompts import suite

TEXT = np.random.default_rng(7).integers(1, 288, 30).tolist()


def test_enough_prompts_calibrate() -> None:
    groups = suite()
    assert set(CALIBRATING) < set(groups)
    assert sum(len(groups[category]) for category in CALIBRATING) >= 32


def test_prompts_are_one_or_the_other(bundle: Bundle) -> None:
    calibrating, held = (prompts(bundle.tokenizer, which) for which in (True, False))
    assert len(calibrating) + len(held) == sum(map(len, suite().values()))
    assert not {tuple(p) for p in calibrating} & {tuple(p) for p in held}
    pieces = held_out(bundle, 100)
    assert sum(map(len, pieces)) == 100
    assert [*chain(*pieces)][: len(held[0])] == held[0][:100]


def test_conversations_fit_the_context(bundle: Bundle) -> None:
    context = bundle.plan.recipe.cache.context
    found = conversations(bundle)
    assert len(found) == len(prompts(bundle.tokenizer, True))
    for text, prompt in zip(found, prompts(bundle.tokenizer, True), strict=True):
        assert len(text) <= context
        assert text[: len(prompt)] == prompt[: len(text)] or len(prompt) > context - 2


def test_calls_are_the_engines_own(bundle: Bundle) -> None:
    traces = Traces(bundle, [TEXT, TEXT[:3]])
    layers, head = (shard.name for shard in bundle.plan.shards)
    found = traces.shard(layers)
    # 3 calls of 8 tokens and a tail of 6; a short text takes single tokens.
    assert Counter({n: len(c) for n, c in found.items()}) == {"prefill": 3, "decode": TAIL + 3}
    rows = np.asarray(bundle.tables().embedding[TEXT[8:16]], np.float16)
    np.testing.assert_array_equal(found["prefill"][1]["hidden"].reshape(-1, 8).T, rows)
    mask = found["prefill"][1]["mask"][0, 0]
    assert ((mask == 0).sum(axis=1) == np.arange(9, 17)).all()  # real positions: 8 to 15
    past = found["prefill"][1]["kv_k"]
    assert (past[..., :8] != 0).all() and not past[..., 8:].any()  # as it was at that call
    assert [len(c) for c in traces.shard(head).values()] == [3, TAIL + 3]


def test_random_samples_are_the_seeds(bundle: Bundle) -> None:
    shard = bundle.plan.shards[0]
    ((function, calls),) = random_samples(shard).items()
    assert function == "decode" and len(calls) == RANDOM_CALLS == 5
    for item in bundle.plan.functions[shard.name, "decode"].inputs:
        values = np.stack([call[item.name] for call in calls])
        assert values.shape[1:] == tuple(item.shape)
    assert values.astype(np.float32).std() == pytest.approx(SPREAD, rel=0.05)
