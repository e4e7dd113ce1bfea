"""Calls that are evaluated first and accepted in part: nothing of what was refused stays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.families.gemma_models import recipe as gemma_recipe
from tests.families.parity import engine_of, tokens
from tests.families.parity import truth as truth_of

from cetane.engine.engine import Engine
from cetane.engine.session import Session, gather
from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

CONTEXT = 32
ROUTED = ["decode", "verify", "prefill"]
steps = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12
)
"""How many tokens are evaluated, how many of them are right, and how many are accepted."""
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def llama_truth(model: Any) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([tokens(288)])).logits[0].numpy()


@pytest.fixture(scope="module")
def zaya_truth(zaya: Any) -> np.ndarray:
    return truth_of(zaya)


@pytest.fixture(scope="module")
def engines(tiny_engine: Callable[..., Engine], zaya_engine: Callable[..., Engine]) -> Any:
    """`engines(family, contract)`, each made once."""
    made: dict[tuple[str, str], Engine] = {}
    forms = {
        "llama": lambda contract: tiny_engine(contract),
        "llama-ct1": lambda contract: tiny_engine(contract, tensor_layout="ct1"),
        "zaya": lambda contract: zaya_engine(contract, kind="single"),
        "zaya-routed": lambda contract: zaya_engine(contract, routed=ROUTED, order="ct1"),
    }

    def engine(family: str, contract: str) -> Engine:
        if (family, contract) not in made:
            made[family, contract] = forms[family](contract)
        return made[family, contract]

    return engine


def remembered(session: Session) -> list[Any]:
    """All that the host keeps, copied."""
    kept = {
        name: value.copy()
        for name, value in (session.memory.caches | session.memory.histories).items()
    }
    return [
        session.position,
        {name: slots.tolist() for name, slots in session.memory.slots.items()},
        kept,
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[:2] == other[:2] and all(np.array_equal(v, other[2][n]) for n, v in one[2].items())


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and float(np.abs(one - other).max(initial=0)) <= 1e-4


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "llama-ct1", "zaya", "zaya-routed"])
@given(steps=steps)
@few
def test_any_drafts_accepted_in_any_part(
    engines, llama_truth, zaya_truth, family: str, contract: str, steps
) -> None:
    """Transformers' logits at every right token, whatever was drafted and refused before it."""
    engine = engines(family, contract)
    truth = llama_truth if family.startswith("llama") else zaya_truth
    ids, session, at = tokens(engine.plan.vocab), engine.session(), 0
    for count, right, taken in steps:
        count = min(count, max(session.widths, default=0))
        if not count:
            break
        right = min(count, max(right, 1))
        wrong = [(token + 1) % engine.plan.vocab for token in ids[at + right : at + count]]
        before = remembered(session)
        found = session.evaluate([*ids[at : at + right], *wrong])
        assert same(remembered(session), before)
        assert found.shape == (count, engine.plan.vocab)
        assert close(found[:right], truth[at : at + right])
        taken = min(taken, right)
        session.accept(taken)
        at += taken
        assert session.position == at
        (slots,) = session.memory.slots.values()
        assert sorted(slots[slots >= 0]) == list(range(at))
    rest = session.feed(ids[at:], "all") if at < CONTEXT else truth[at:]
    assert close(rest, truth[at:])


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "zaya-routed"])
@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_accepting_some_is_as_if_the_others_had_not_been_there(
    engines, family: str, contract: str, taken: int
) -> None:
    """Bit for bit, against a session that evaluated other tokens after the accepted ones."""
    engine = engines(family, contract)
    ids = tokens(engine.plan.vocab)
    found = []
    for other in (1, 7):
        session = engine.session()
        session.feed(ids[:5])
        refused = [(token + other) % engine.plan.vocab for token in ids[5 + taken : 9]]
        session.evaluate([*ids[5 : 5 + taken], *refused])
        session.accept(taken)
        found.append(session.feed(ids[5 + taken : 9 + taken], "all"))
    assert np.array_equal(*found)


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift"])
def test_refused_columns_are_in_no_cache(engines, contract: str) -> None:
    """What the host keeps is, bit for bit, what it is after other refused tokens, or none."""
    engine, kept = engines("llama", contract), []
    for refused in ([], [5, 6], [7, 7]):
        session = engine.session()
        session.feed(tokens(288)[:5])
        session.evaluate([*tokens(288)[5:7], *refused])
        session.accept(2)
        kept.append(remembered(session))
    assert same(kept[1], kept[2])
    for name, cache in kept[0][2].items():
        assert np.allclose(cache, kept[1][2][name], atol=1e-5), name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_accepting_all_is_feeding(engines, contract: str) -> None:
    engine = engines("zaya-routed", contract)
    ids = tokens(engine.plan.vocab)
    fed, evaluated = engine.session(), engine.session()
    for start, stop in ((0, 8), (8, 12), (12, 13), (13, 17)):
        expected = fed.feed(ids[start:stop], "all")
        assert np.array_equal(evaluated.evaluate(ids[start:stop]), expected)
        evaluated.accept(stop - start)
        assert same(remembered(fed), remembered(evaluated))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "zaya-routed"])
def test_a_prepared_draft_is_one_that_is_evaluated(engines, family: str, contract: str) -> None:
    """Also the calls that are prepared behind it, before any has run."""
    engine = engines(family, contract)
    ids = tokens(engine.plan.vocab)
    now, later = engine.session(), engine.session()
    now.feed(ids[:5], "none")
    logits = now.evaluate([*ids[5:7], 9, 9])
    now.accept(2)
    rest = now.feed(ids[7:12], "all")
    calls = later.prepare(ids[:5], "none")
    calls.append(later.prepare_draft([*ids[5:7], 9, 9], range(2)))
    calls += later.prepare(ids[7:12], "all")
    engine.run([(later, calls)])
    drafted, *others = [call for call in calls if call.logits is not None]
    assert np.array_equal(gather([drafted], "all"), logits)
    assert np.array_equal(gather(others, "all"), rest)
    assert same(remembered(now), remembered(later))
    with pytest.raises(CetaneError, match="they are no path"):
        later.prepare_draft([1, 2, 3], [0, 2])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_what_is_not_accepted_is_forgotten(engines, llama_truth, contract: str) -> None:
    ids, session = tokens(288), engines("llama", contract).session()
    session.feed(ids[:3])
    session.evaluate([9, 9, 9, 9])
    session.evaluate([8, 8])  # instead of the four
    session.accept(0)
    with pytest.raises(CetaneError, match="cannot accept 1 tokens: 0 have been evaluated"):
        session.accept(1)
    session.evaluate([7])
    assert close(session.feed(ids[3:9], "all"), llama_truth[3:9])
    with pytest.raises(CetaneError, match="cannot accept 1 tokens"):
        session.accept(1)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "zaya", "zaya-routed"])
def test_rewinding_to_a_mark(engines, llama_truth, zaya_truth, family: str, contract: str) -> None:
    truth = llama_truth if family == "llama" else zaya_truth
    engine = engines(family, contract)
    ids, session = tokens(engine.plan.vocab), engine.session()
    session.feed(ids[:6])
    marks = [session.mark()]
    for token in (5, 6, 7):
        session.feed([token])
        marks.append(session.mark())
    session.evaluate([1, 2, 3])
    session.rewind(marks[2])
    with pytest.raises(CetaneError, match="cannot accept"):
        session.accept(1)
    assert session.position == 8
    fresh = engine.session()
    fresh.feed([*ids[:6], 5, 6], "none")
    assert close(session.feed(ids[8:12], "all"), fresh.feed(ids[8:12], "all"))
    for _ in range(2):
        session.rewind(marks[0])
        assert session.position == 6
        assert close(session.feed(ids[6:12], "all"), truth[6:12])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_calls_shrink_with_what_is_left_of_the_context(engines, llama_truth, contract: str) -> None:
    ids, session = tokens(288), engines("llama", contract).session()
    session.feed(ids[:20], "none")
    assert session.widths == [1, 4, 8]
    session.feed(ids[20:27], "none")
    assert session.widths == [1, 4]
    assert close(session.evaluate(ids[27:31]), llama_truth[27:31])
    session.accept(3)
    assert session.widths == [1]
    with pytest.raises(CetaneError, match="one call takes 1 tokens here, not 2"):
        session.evaluate(ids[30:])
    with pytest.raises(CetaneError, match="3 tokens after 30 do not fit a context of 32"):
        session.evaluate([1, 2, 3])
    for token in (30, 31):
        assert close(session.evaluate([ids[token]]), llama_truth[token : token + 1])
        session.accept(1)
    assert session.widths == []
    with pytest.raises(CetaneError, match="1 tokens after 32 do not fit"):
        session.evaluate([1])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([288], "token 288 is not in the vocabulary"),
        ([1] * 9, "one call takes 8 tokens here, not 9"),
    ],
)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_bad_tokens(engines, llama_truth, contract: str, ids: list[int], message: str) -> None:
    session = engines("llama", contract).session()
    session.feed(tokens(288)[:5])
    with pytest.raises(CetaneError, match=message):
        session.evaluate(ids)
    assert close(session.feed(tokens(288)[5:9], "all"), llama_truth[5:9])


@pytest.mark.parametrize("count", [-1, 3])
def test_accepting_what_was_not_there(engines, count: int) -> None:
    session = engines("llama", "readonly").session()
    session.evaluate([1, 2])
    with pytest.raises(CetaneError, match=f"cannot accept {count} tokens: 2 have been evaluated"):
        session.accept(count)
    session.accept(2)
    assert session.position == 2


def test_a_call_that_fails_while_evaluated_leaves_the_session_as_it_was(
    tiny_engine, llama_truth
) -> None:
    engine = tiny_engine()
    ids, session = tokens(288), engine.session()
    session.feed(ids[:5])
    program = engine.open("head-1")
    call = program.call

    def fail(*arguments: Any) -> Any:
        raise CetaneError("head-1 is damaged")

    program.call = fail
    with pytest.raises(CetaneError, match="is damaged"):
        session.evaluate(ids[5:8])
    program.call = call
    with pytest.raises(CetaneError, match="0 have been evaluated"):
        session.accept(3)
    assert close(session.feed(ids[5:9], "all"), llama_truth[5:9])


@pytest.mark.parametrize("sliding", CONTRACTS)
@given(steps=steps)
@few
def test_windows(gemma_truth: np.ndarray, gemma_engines: Any, sliding: str, steps: Any) -> None:
    """The same where a group's slots are used again, and layers share caches."""
    engine = gemma_engines(sliding)
    ids, session = tokens(engine.plan.vocab, 64), engine.session()
    session.feed(ids[:16], "none")  # beyond the window of 12
    at = 16
    for count, right, taken in steps:
        count = min(count, max(session.widths, default=0), len(ids) - at)
        if count <= 0:
            break
        right = min(count, max(right, 1))
        wrong = [(token + 1) % engine.plan.vocab for token in ids[at + right : at + count]]
        found = session.evaluate([*ids[at : at + right], *wrong])
        assert close(found[:right], gemma_truth[at : at + right])
        taken = min(taken, right)
        session.accept(taken)
        at += taken
    if at < len(ids):
        assert close(session.feed(ids[at:], "all"), gemma_truth[at:])


@pytest.fixture(scope="module")
def gemma_truth(gemma: Any) -> np.ndarray:
    return truth_of(gemma, 64)


@pytest.fixture(scope="module")
def gemma_engines(gemma: Any) -> Any:
    made: dict[str, Engine] = {}

    def engine(sliding: str) -> Engine:
        if sliding not in made:
            made[sliding] = engine_of(gemma, gemma_recipe(sliding=sliding))
        return made[sliding]

    return engine
