"""The prefix cache: what it does not compute again, and that this changes no bit."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.families.gemma_models import build_gemma4
from tests.families.gemma_models import recipe as gemma_recipe
from tests.families.parity import engine_of

from cetane.engine.likelihood import likelihoods, token_likelihood
from cetane.engine.prefixes import Prefixes
from cetane.errors import CetaneError
from cetane.schema.interface import FromCache
from cetane.schema.slots import CONTRACTS

IDS = np.random.default_rng(5).integers(1, 288, 30).tolist()
OTHER = np.random.default_rng(6).integers(1, 288, 30).tolist()


def fresh(engine: Any, tokens: list[int]) -> np.ndarray:
    """The logits of a session that knows nothing."""
    return Prefixes(engine, most=0).feed(tokens).logits


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_known_start_gives_the_same_bits(tiny_engine, contract: str) -> None:
    engine = tiny_engine(contract)
    prefixes = Prefixes(engine)
    prompts = [IDS[:20], IDS[:20], IDS[:29], IDS[:9] + OTHER[:9], IDS[:20], OTHER, IDS[:7], IDS]
    cached = []
    for prompt in prompts:
        fed = prefixes.feed(prompt)
        cached.append(fed.cached)
        assert np.array_equal(fed.logits, fresh(engine, prompt))
        for token in OTHER[: engine.plan.recipe.cache.context - len(prompt)]:  # an answer
            fed.session.feed([token])
    assert cached[0] == 0
    assert cached[1] == 20
    assert cached[2] >= 16  # calls of 8 tokens
    assert cached[3] == 8
    assert cached[5] == 0
    assert len(prefixes.known) <= 4


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift"])
def test_a_mark_copies_only_windows(contract: str) -> None:
    """A cache of the whole context needs no copy: its columns after the mark are not shown."""
    engine = engine_of(build_gemma4(sliding_window=12), gemma_recipe(contract, sliding=contract))
    session, alone = engine.session(), engine.session()
    for one in (session, alone):
        one.feed(IDS[:20])
    mark = session.mark()
    groups = engine.plan.caches
    sources = [
        item.source
        for function in engine.plan.functions.values()
        for item in function.inputs
        if isinstance(item.source, FromCache)
    ]
    assert {groups[source.group].limited for source in sources} == {True, False}
    for source in sources:
        copied = not np.shares_memory(mark.caches[source.name], session.memory.caches[source.name])
        assert copied == groups[source.group].limited
    for _ in range(2):  # the second return finds what the first one did
        session.feed(OTHER)  # takes the slots of a window again
        session.rewind(mark)
    assert np.array_equal(session.feed(IDS[20:]), alone.feed(IDS[20:]))


def test_logits_hold_no_other_rows(tiny_engine) -> None:
    engine = tiny_engine()
    assert engine.session().feed(IDS[:8]).base is None
    _, fed = likelihoods(Prefixes(engine), IDS, 1, top=1)
    assert fed.logits.base is None


def test_sessions_are_bounded_and_the_oldest_goes(tiny_engine) -> None:
    prefixes = Prefixes(tiny_engine(), most=2)
    for prompt in (IDS[:16], OTHER[:16], IDS[:16], [7, *IDS[:15]]):
        prefixes.feed(prompt)
    assert len(prefixes.known) == 2
    assert prefixes.feed(IDS[:16]).cached == 16
    assert prefixes.feed(OTHER[:16]).cached == 0


def test_two_conversations_do_not_drive_each_other_out(tiny_engine) -> None:
    prefixes = Prefixes(tiny_engine())
    one, two = IDS[:8] + OTHER[:8], IDS[:8] + OTHER[8:16]
    prefixes.feed(one)
    assert prefixes.feed(two).cached == 8
    assert prefixes.feed(one).cached == prefixes.feed(two).cached == 16


def test_an_end_between_two_calls(tiny_engine) -> None:
    class Left(Exception):
        pass

    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Left

    engine = tiny_engine()
    prefixes = Prefixes(engine)
    with pytest.raises(Left):
        prefixes.feed(IDS, check=check)
    fed = prefixes.feed(IDS)
    assert fed.cached == 16
    assert np.array_equal(fed.logits, fresh(engine, IDS))


def test_a_cancelled_prompt_leaves_no_logits(tiny_engine) -> None:
    """It went on from a whole prompt, and ended after one more call. That call's end is no prompt
    whose logits are known."""
    engine = tiny_engine()
    prefixes = Prefixes(engine)
    prefixes.feed(IDS[:8])
    ends = iter([None, TimeoutError()])

    def check() -> None:
        if (end := next(ends)) is not None:
            raise end

    with pytest.raises(TimeoutError):
        prefixes.feed(IDS[:24], check=check)
    assert np.array_equal(prefixes.feed(IDS[:16]).logits, fresh(engine, IDS[:16]))


def test_bad_prompts(tiny_engine) -> None:
    prefixes = Prefixes(tiny_engine())
    for tokens, message in (
        ([], "no tokens"),
        ([5] * 33, "do not fit"),
        ([*IDS[:20], 288], "vocabulary"),
        ([1.5], "not a whole number"),
    ):
        with pytest.raises(CetaneError, match=message):
            prefixes.feed(tokens)
    assert not prefixes.known
    assert prefixes.feed(IDS).cached == 0
    assert prefixes.feed(np.array(IDS)).cached == len(IDS)


@pytest.mark.parametrize("start", [1, 9, 20])
def test_scores_are_those_of_transformers(tiny_engine, model: Any, start: int) -> None:
    engine = tiny_engine()
    with torch.inference_mode():
        truth = torch.log_softmax(model(torch.tensor([IDS])).logits[0].double(), -1).numpy()
    prefixes = Prefixes(engine)
    prefixes.feed(IDS[:20])  # a start of it is known
    scores, fed = likelihoods(prefixes, IDS, start, top=3)
    assert [s.token for s in scores] == IDS[start:]
    wanted = [truth[i - 1, IDS[i]] for i in range(start, len(IDS))]
    np.testing.assert_allclose([s.logprob for s in scores], wanted, atol=1e-4)
    for row, s in zip(truth[start - 1 :], scores, strict=False):
        assert [token for token, _ in s.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert s.greedy == (s.token == row.argmax())
    assert fed.cached == (start - 1) // 8 * 8
    alone, _ = likelihoods(Prefixes(engine), IDS, start, top=3)
    assert alone == scores  # to the last bit


def test_a_token_that_the_head_lacks() -> None:
    row = np.array([0, -np.inf, 0], np.float32)
    assert token_likelihood(row, 1, 1).logprob == -9999.0
    assert token_likelihood(row, 0, 9).top == ((0, np.log(0.5)), (2, np.log(0.5)), (1, -9999.0))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_have_no_score(wrong: float) -> None:
    with pytest.raises(CetaneError, match="the logits hold"):
        token_likelihood(np.array([0.0, wrong, 1.0], np.float32), 0, 1)
