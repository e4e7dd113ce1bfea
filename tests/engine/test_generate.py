"""Generation: equal to transformers' own greedy search, and where it stops."""

from typing import Any

import numpy as np
import pytest
import torch

from cetane.engine.generate import generate
from cetane.engine.open import open_backend
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

PROMPT = np.random.default_rng(2).integers(1, 288, 11).tolist()


@pytest.fixture(scope="module")
def greedy(model: Any) -> list[int]:
    """Twenty tokens of transformers' greedy search."""
    ids = torch.tensor([PROMPT])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    return found[0, len(PROMPT) :].tolist()


@pytest.fixture
def session(tiny_engine) -> Any:
    return tiny_engine().session()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_greedy_is_that_of_transformers(tiny_engine, greedy: list[int], contract: str) -> None:
    session = tiny_engine(contract).session()
    assert list(generate(session, PROMPT, Sampler(), 20)) == greedy
    assert session.position == len(PROMPT) + 19  # the last one has not been fed


@pytest.mark.parametrize("count", [0, 1, 3])
def test_max_new(session, greedy: list[int], count: int) -> None:
    assert list(generate(session, PROMPT, Sampler(), count)) == greedy[:count]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_token_is_not_yielded(session, greedy: list[int], at: int) -> None:
    stop = (287, greedy[at])
    first = next(i for i, token in enumerate(greedy) if token in stop)
    assert list(generate(session, PROMPT, Sampler(), 20, stop)) == greedy[:first]


@pytest.mark.parametrize(("prompt", "count"), [(32, 1), (31, 2), (29, 4)])
def test_the_end_of_the_context(session, prompt: int, count: int) -> None:
    assert len(list(generate(session, [5] * prompt, Sampler(), 20))) == count
    assert session.position == 32


def test_a_prompt_that_does_not_fit(session) -> None:
    with pytest.raises(CetaneError, match="33 tokens after 0 do not fit"):
        list(generate(session, [5] * 33, Sampler(), 1))


def test_an_empty_prompt(session) -> None:
    with pytest.raises(CetaneError, match="no tokens"):
        list(generate(session, [], Sampler(), 1))


def test_a_conversation_goes_on_with_the_last_token(session, greedy: list[int]) -> None:
    first = list(generate(session, PROMPT, Sampler(), 6))
    second = list(generate(session, first[-1:], Sampler(), 6))
    assert first + second == greedy[:12]


def test_sampling_is_repeatable(tiny_engine) -> None:
    engine = tiny_engine()
    one, again, other = (
        list(generate(engine.session(), PROMPT, Sampler(2.0, seed=seed), 12)) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_unknown_backends_name_the_known() -> None:
    with pytest.raises(CetaneError, match="unknown backend 'gpu'; known: auto, portable, coreml"):
        open_backend(None, "gpu")
