"""Prompt lookup against a search that looks everywhere."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.speculate.ngram import Ngram, PublishedNgram


def session(position: int = 0) -> Any:
    """All that a drafter asks of a session."""
    return SimpleNamespace(position=position, no_trees="lines")


def search(tokens: list[int], low: int, high: int, most: int) -> tuple[list[int], int]:
    """The rule, spelt out: longest suffix, last earlier occurrence, continued into itself."""
    for length in range(min(high, len(tokens)), low - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                found = list(tokens)
                for i in range(most):
                    found.append(found[end + i])
                return found[len(tokens) :], length
    return [], 0


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    low=st.integers(1, 3),
    more=st.integers(0, 4),
    most=st.integers(1, 9),
)
def test_every_text_in_any_pieces(tokens, cuts, low: int, more: int, most: int) -> None:
    drafter = Ngram(low, low + more)
    bounds = [0, *sorted(cuts), len(tokens)]
    drafter.begin(session(), tokens[: bounds[1]])
    for start, stop in pairwise(bounds[1:]):
        drafter.extend(tokens[start:stop])
    expected, length = search(tokens, low, low + more, most)
    draft = drafter.propose(most)
    assert list(draft.tokens) == expected
    assert draft.kind == (f"ngram-{length}" if length else "")


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), low=st.integers(1, 3))
def test_the_published_look_up_reads_the_last_token_twice(tokens: list[int], low: int) -> None:
    drafter = PublishedNgram(low, low + 2)
    drafter.begin(session(), tokens)
    expected, _ = search([*tokens, tokens[-1]], low, low + 2, 3)
    assert list(drafter.propose(3).tokens) == expected
    if len(set(tokens)) == len(tokens):
        assert expected == (3 * tokens[-1:] if low == 1 else [])


def test_a_new_session_forgets_the_text_and_the_same_goes_on() -> None:
    drafter = Ngram()
    first = session()
    drafter.begin(first, [1, 2, 3])
    drafter.extend([4, 5])
    first.position = 4  # the last token has not been fed: it comes again
    drafter.begin(first, [5, 1, 2])
    assert drafter.tokens == [1, 2, 3, 4, 5, 1, 2]
    assert drafter.propose(2).tokens == (3, 4)
    drafter.begin(session(), [1, 2])
    assert drafter.propose(1).tokens == ()


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3), (-1, -1), (1, 10**9)])
def test_lengths(low: int, high: int) -> None:
    with pytest.raises(CetaneError, match="least <= most"):
        Ngram(low, high)
