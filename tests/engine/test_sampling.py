"""Sampling against transformers' logits processors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cetane.engine.sampling import Sampler, largest, softmax
from cetane.engine.verify import Draft, verify
from cetane.errors import CetaneError

logits = st.builds(
    lambda seed, size, scale: np.float32(np.random.default_rng(seed).normal(size=size) * scale),
    seed=st.integers(0, 10**6),
    size=st.integers(1, 200),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
chances = st.floats(0.01, 0.99)


def expected(scores: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """What transformers draws from; its `generate` applies the same processors in this order."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    rows = torch.from_numpy(scores).double()[None]
    return torch.softmax(processors(torch.zeros(1, 1, dtype=torch.long), rows), -1)[0].numpy()


@settings(max_examples=300, derandomize=True)
@given(
    logits,
    st.floats(0.1, 5.0),
    st.just(0) | st.integers(1, 250),
    st.just(1.0) | chances,
    st.just(0.0) | chances,
)
def test_distribution(
    scores: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    ours = Sampler(temperature, top_k, top_p, min_p).probabilities(scores)
    theirs = expected(scores, temperature, top_k, top_p, min_p)
    assert np.array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_filters_by_hand() -> None:
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    kept = {
        "top_k": (Sampler(1.0, top_k=2), [0, 4, 0, 3]),
        "top_p": (Sampler(1.0, top_p=0.75), [0, 4, 2, 3]),
        "min_p": (Sampler(1.0, min_p=0.6), [0, 4, 0, 3]),
        "none": (Sampler(1.0), [1, 4, 2, 3]),
        "one at least": (Sampler(1.0, top_p=0.0), [0, 1, 0, 0]),
        "the likeliest": (Sampler(1.0, min_p=1.0), [0, 1, 0, 0]),
    }
    for name, (sampler, weights) in kept.items():
        wanted = np.array(weights) / sum(weights)
        np.testing.assert_allclose(sampler.probabilities(scores), wanted, atol=1e-6, err_msg=name)


def test_probabilities_leave_the_logits_alone() -> None:
    scores = np.arange(5, dtype=np.float64)
    Sampler(1.0, top_k=1).probabilities(scores)
    assert scores.tolist() == [0, 1, 2, 3, 4]


@given(logits)
def test_greedy(scores: np.ndarray) -> None:
    assert Sampler()(scores) == scores.tolist().index(max(scores.tolist()))


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    scores = np.random.default_rng(0).normal(size=50).astype(np.float32)
    sampler = Sampler(5.0, top_k=1, seed=0)
    assert {sampler(scores) for _ in range(20)} == {int(scores.argmax())}


def test_frequencies() -> None:
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    sampler = Sampler(temperature=1.0, seed=0)
    counts = np.bincount([sampler(scores) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.4, 0.2, 0.3], atol=0.03)


def test_seeds() -> None:
    scores = np.zeros(1000, np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, seed=seed)
        return [sampler(scores) for _ in range(8)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"temperature": -0.1}, "temperature = -0.1: must be finite, at least 0"),
        ({"temperature": float("nan")}, "temperature = nan: must be finite, at least 0"),
        ({"temperature": float("inf")}, "temperature = inf: must be finite, at least 0"),
        ({"top_k": -1}, "top-k = -1: must be finite, at least 0"),
        ({"top_p": -0.1}, "top-p = -0.1: must be between 0.0 and 1.0"),
        ({"top_p": 1.1}, "top-p = 1.1: must be between"),
        ({"min_p": -0.1}, "min-p = -0.1: must be between"),
        ({"min_p": 1.5}, "min-p = 1.5: must be between"),
        ({"seed": -1}, "seed = -1: must be finite, at least 0"),
        ({"presence_penalty": 2.5}, "presence penalty = 2.5: must be between -2.0 and 2.0"),
        ({"frequency_penalty": float("nan")}, "frequency penalty = nan: must be between"),
    ],
    ids=str,
)
def test_bad_values(option: dict[str, float], named: str) -> None:
    with pytest.raises(CetaneError, match=named):
        Sampler(**option)


@pytest.mark.parametrize("bias", [float("inf"), float("nan")])
def test_a_bias_that_is_no_number(bias: float) -> None:
    with pytest.raises(CetaneError, match="logit bias of token 5"):
        Sampler(logit_bias={5: bias})


def test_a_bias_of_minus_infinity_forbids() -> None:
    scores = np.array([1.0, 3.0, 2.0], np.float32)
    assert Sampler(logit_bias={1: -np.inf})(scores) == 2
    assert Sampler(1.0, logit_bias={1: -np.inf}).probabilities(scores)[1] == 0


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_of_equals_the_first_are_the_largest(count: int) -> None:
    scores = np.array([5, 7, 7, 1, 7, 7.0])
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    assert largest(scores, count).tolist() == order[:count]


def test_a_nucleus_of_many_tokens() -> None:
    """More than are sorted first, nearly alike, and of equals the first."""
    random = np.random.default_rng(2)
    for scores in (random.normal(size=3000) / 100, np.zeros(3000)):
        ours = Sampler(1.0, top_p=0.5).probabilities(scores)
        order = np.argsort(-scores, kind="stable")
        sums = np.cumsum(softmax(scores)[order])
        kept = np.sort(order[: 1 + np.flatnonzero(sums >= 0.5)[0]])
        assert len(kept) > 1000
        assert np.flatnonzero(ours).tolist() == kept.tolist()


def test_softmax_of_large_scores() -> None:
    np.testing.assert_allclose(softmax(np.array([1e4, 1e4, -1e4])), [0.5, 0.5, 0])


@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_greedy() -> None:
    scores = np.array([1, 3, -2], np.float32)
    for options in ({}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        assert Sampler(1e-310, **options).probabilities(scores).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("value", "named"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_logits_that_are_not_finite(temperature: float, value: float, named: str) -> None:
    with pytest.raises(CetaneError, match=f"the logits hold {named}"):
        Sampler(temperature)(np.array([1, value, 2], np.float32))


def test_a_token_that_is_ruled_out() -> None:
    scores = np.array([0, -np.inf, 0], np.float32)
    assert Sampler(1.0).probabilities(scores).tolist() == [0.5, 0, 0.5]


def test_penalties_and_bias_by_hand() -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    scores = np.array([1, 2, 3, 4], np.float32)
    sampler = Sampler(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 1.5})
    np.testing.assert_allclose(sampler.controlled(scores), [2.5, 2, 3, 4])
    for token in (3, 3, 1):
        sampler.keep(token)
    np.testing.assert_allclose(sampler.controlled(scores), [2.5, 1.25, 3, 3])
    assert scores.tolist() == [1, 2, 3, 4]
    sampler.keep(3)
    assert sampler(scores) == 2  # 4 - 0.5 - 0.75 is less than 3
    with pytest.raises(CetaneError, match="token 4 is not in the vocabulary"):
        Sampler(logit_bias={4: 1.0})(scores)


class Even:
    """Allows even tokens, and the answer's second token must be 2."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.arange(4) == 2 if len(self.tokens) == 1 else np.arange(4) % 2 == 0

    def keep(self, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint(temperature: float) -> None:
    scores = np.array([5, 9, 1, 9], np.float32)
    sampler = Sampler(temperature, seed=0, constraint=Even(), logit_bias={2: -1.0})
    chosen = []
    for _ in range(3):
        chosen.append(sampler(scores))
        sampler.keep(chosen[-1])
    assert set(chosen) <= {0, 2} and chosen[1] == 2
    with pytest.raises(CetaneError, match="allows no token"):
        sampler(np.array([-np.inf, 0, -np.inf, 0], np.float32))


def test_a_constraint_refuses_a_draft() -> None:
    rows = np.array([[0, 0, 9, 0], [0, 9, 5, 0], [0, 9, 0, 0]], np.float32)
    sampler = Sampler(constraint=Even())
    assert verify(rows, Draft((2, 1)), sampler) == [2, 2]
    assert sampler.constraint.tokens == [2, 2]
