"""Break-even against simulation, and against the published tables."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.perf.breakeven import DraftingTimes, per_slot_formula, tokens_per_call


def simulate(chance: float, width: int, calls: int) -> float:
    """Tokens a call, by drawing every draft: accepted until the first refusal, and one free."""
    draw = random.Random(7)
    tokens = 0
    for _ in range(calls):
        tokens += 1
        for _ in range(width - 1):
            if draw.random() >= chance:
                break
            tokens += 1
    return tokens / calls


@pytest.mark.parametrize(("chance", "width"), [(0.0, 4), (0.3, 2), (0.6, 4), (0.9, 8), (1.0, 4)])
def test_tokens_per_call_against_simulation(chance: float, width: int) -> None:
    assert tokens_per_call(chance, width) == pytest.approx(
        simulate(chance, width, 60_000), rel=0.02
    )


@settings(max_examples=60)
@given(
    t1=st.floats(1, 200), ratio=st.floats(0.5, 6), width=st.integers(2, 8), draft=st.floats(0, 20)
)
def test_break_even_is_where_speed_is_equal(
    t1: float, ratio: float, width: int, draft: float
) -> None:
    spec = DraftingTimes(t1, t1 * ratio, width, draft)
    chance, share = spec.break_even_chance(), spec.break_even_share()
    if not spec.feasible:
        assert chance is None and share is None and spec.ceiling <= 1
        return
    assert chance is not None and share is not None
    assert spec.ceiling <= width
    if spec.slowdown <= 1:
        assert (chance, share) == (0, 0)
        return
    assert tokens_per_call(chance, width) == pytest.approx(spec.slowdown, rel=1e-6)
    # the share form: 1 + (K - 1) p tokens a call
    assert 1 + (width - 1) * share == pytest.approx(spec.slowdown)


@pytest.mark.parametrize(
    ("t1", "tv", "slowdown", "share"),
    [
        (130, 475, 3.65, 0.885),  # experiment 32 as stated
        (56.2, 78, 1.39, 0.13),  # Phi-4-mini
        (112, 499, 4.46, None),  # experiment 34: 0.10 by its own formula
        (109, 483, 4.43, None),  # experiment 35
    ],
)
def test_published_cases(t1: float, tv: float, slowdown: float, share: float | None) -> None:
    spec = DraftingTimes(t1, tv, 4)
    assert spec.slowdown == pytest.approx(slowdown, abs=0.01)
    found = spec.break_even_share()
    assert found == (None if share is None else pytest.approx(share, abs=0.005))


def test_the_published_formula_is_no_break_even() -> None:
    assert per_slot_formula(112, 499, 4) == pytest.approx(0.10, abs=0.005)
    assert tokens_per_call(0.10, 4) < 0.26 * DraftingTimes(112, 499, 4).slowdown
    # where every draft must be right, it says that none need be
    assert per_slot_formula(100, 400, 4) == 0
    assert DraftingTimes(100, 399.99, 4).break_even_share() == pytest.approx(1, abs=1e-3)


def test_drafting_counts() -> None:
    assert DraftingTimes(30, 35, 3, draft=11).slowdown == pytest.approx(46 / 30)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        *((case, "^t1 = .*: no time of a call")
          for case in ((0, 1, 4), (float("nan"), 1, 4), (inf, 1, 4), (inf, inf, 4))),
        *((case, "^tv = .*: no time of a call") for case in ((1, -1, 4), (1, inf, 4))),
        *((case, "^draft = .*: no time") for case in ((1, 1, 4, -1), (1, 1, 4, inf))),
        *((case, "no call takes so many") for case in ((1e300, 1e-300, 4), (1e-300, 1e300, 4))),
        *((case, "^k = .*: no number") for case in ((1, 1, 1), (1, 2, 1025), (1, 2, 10**400))),
    ],
)  # fmt: skip
def test_what_is_no_time_and_no_width(case: tuple[float, ...], message: str) -> None:
    """Each has a hint of its own."""
    with pytest.raises(CetaneError, match=message) as caught:
        DraftingTimes(*case)  # type: ignore[arg-type]
    assert caught.value.hint


def test_the_widest_call() -> None:
    assert DraftingTimes(1, 2, 1024).break_even_chance() == pytest.approx(0.5)


def test_bad_acceptance() -> None:
    with pytest.raises(CetaneError, match="between 0 and 1"):
        tokens_per_call(1.1, 4)
