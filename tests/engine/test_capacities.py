"""Capacities: caches grow between calls, and no token differs from a bundle without them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cetane.engine.engine import Engine
from cetane.engine.prefixes import Prefixes
from cetane.engine.session import Session
from cetane.engine.slots import grown
from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

IDS = np.random.default_rng(7).integers(1, 288, 160).tolist()


@pytest.fixture(scope="module")
def truth(model: Any) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module")
def ladder(tiny_engine: Callable[..., Engine]) -> Callable[[str], Engine]:
    """`ladder(contract)`: an engine with capacities of 32, 64 and 160 tokens."""

    def make(contract: str) -> Engine:
        cache = {"contract": contract, "capacities": [32, 64], "context": 160}
        return tiny_engine(cache=cache)

    return make


def close(logits: np.ndarray | None, expected: np.ndarray) -> bool:
    assert logits is not None
    return logits.shape == expected.shape and float(np.abs(logits - expected).max()) <= 1e-4


def feed(session: Session, stop: int) -> np.ndarray:
    logits = session.feed(IDS[session.position : stop], "all")
    assert logits is not None
    return logits


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    "stops",
    [
        [160],  # both crossings inside one prefill
        [30, *range(31, 37), 60, *range(61, 68)],  # inside decode
        [29, 33, 62, 66],  # inside a call of four tokens
        [100],  # over a capacity that some calls need
        [5, 39, 40, 41, 95],
    ],
)
def test_every_crossing_gives_the_models_own_logits(ladder, truth, contract, stops) -> None:
    session = ladder(contract).session()
    for stop in stops:
        start = session.position
        assert close(feed(session, stop), truth[start:stop])


def test_a_call_runs_in_the_smallest_capacity_that_holds_it(ladder) -> None:
    session = ladder("readonly").session()
    sizes = []
    for stop in (1, 24, 32, 33, 64, 65, 100):
        feed(session, stop)
        sizes.append({cache.shape[-1] for cache in session.memory.caches.values()})
    assert sizes == [{32}, {32}, {32}, {64}, {64}, {160}, {160}]


def test_a_state_has_room_for_padding(ladder, truth) -> None:
    session = ladder("stateful").session()
    feed(session, 30)  # three calls of 8, then 6 tokens and padding, which ends at 32
    assert session.memory.capacity == 32
    assert close(feed(session, 32), truth[30:32])  # a call of four ends at 34
    assert session.memory.capacity == 64


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_refused_draft_leaves_nothing_behind(ladder, truth, contract: str) -> None:
    session = ladder(contract).session()
    feed(session, 30)
    wrong = [IDS[30], 5, 6, 7]
    session.evaluate(wrong)  # ends at 34, beyond the first capacity
    session.accept(1)
    assert close(session.evaluate(IDS[31:35]), truth[31:35])
    session.accept(0)
    assert close(session.evaluate(IDS[31:35]), truth[31:35])
    session.accept(4)
    assert close(feed(session, 70), truth[35:70])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_rewinding_returns_to_the_capacity_of_the_mark(ladder, truth, contract: str) -> None:
    session = ladder(contract).session()
    feed(session, 20)
    mark = session.mark()
    session.feed(IDS[100:150], "none")  # another text, beyond two capacities
    session.rewind(mark)
    assert session.memory.capacity == 32
    assert close(feed(session, 28), truth[20:28])
    assert close(feed(session, 90), truth[28:90])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_prompts_share_their_start_across_capacities(ladder, truth, contract: str) -> None:
    prefixes = Prefixes(ladder(contract))
    assert close(prefixes.feed(IDS[:72]).logits, truth[71])
    other = prefixes.feed([*IDS[:24], *IDS[100:130]])
    assert other.cached >= 16
    again = prefixes.feed(IDS[:96])
    assert again.cached >= 16
    assert close(again.logits, truth[95])
    fresh = Prefixes(ladder(contract)).feed(IDS[:96])
    assert np.array_equal(again.logits, fresh.logits)
    assert again.session.memory.capacity == fresh.session.memory.capacity


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_session_goes_on_from_another(ladder, truth, contract: str) -> None:
    first, second = ladder(contract).session(), ladder(contract).session()
    feed(first, 40)
    second.take(first)
    second.feed(IDS[100:130])  # another text
    assert second.position == 70
    assert close(feed(first, 70), truth[40:70])
    third = ladder(contract).session()
    third.take(first)
    assert close(feed(third, 90), truth[70:90])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_session_keeps_what_it_took_while_the_other_goes_on(ladder, truth, contract) -> None:
    engine = ladder(contract)
    first, second, third = engine.session(), engine.session(), engine.session()
    start = first.mark()
    feed(first, 20)
    second.take(first)
    third.take(second)  # which has made no call yet
    first.rewind(start)
    first.feed(IDS[100:140], "none")  # another text, in larger caches
    assert close(feed(second, 50), truth[20:50])
    assert close(feed(third, 50), truth[20:50])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_session_goes_on_from_one_that_was_rewound(ladder, truth, contract: str) -> None:
    first, second = ladder(contract).session(), ladder(contract).session()
    feed(first, 20)
    mark = first.mark()
    feed(first, 70)
    first.rewind(mark)  # its caches are smaller again
    second.take(first)
    assert close(feed(second, 80), truth[20:80])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_end_is_the_contexts(ladder, truth, contract: str) -> None:
    session = ladder(contract).session()
    feed(session, 156)
    assert close(feed(session, 160), truth[156:])
    with pytest.raises(CetaneError, match="1 tokens after 160 do not fit a context of 160"):
        session.feed([1])


def test_slots_of_a_cache_that_shifts_grow_on_the_left() -> None:
    held = np.array([[3, 4]])
    assert grown(held, "shift", 4, -1).tolist() == [[-1, -1, 3, 4]]
    assert grown(held, "blend", 4, -1).tolist() == [[3, 4, -1, -1]]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("drafted", [2, 3])
def test_a_short_draft_before_a_crossing(ladder, truth, contract: str, drafted: int) -> None:
    """Its padding takes slots where a cache shifts, so the first token must not fall out."""
    session = ladder(contract).session()
    feed(session, 29)
    assert close(session.evaluate(IDS[29 : 29 + drafted]), truth[29 : 29 + drafted])
