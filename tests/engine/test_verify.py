"""What is chosen has the target's distribution, whatever was drafted."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from cetane.engine.sampling import Sampler, softmax
from cetane.engine.verify import Draft, choose, grafted, verify

RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(4, 6)).astype(np.float32) * 1.5
DRAWS = 8_000


@pytest.mark.parametrize(
    ("drafted", "new"),
    [
        ([], [2]),
        ([2], [2, 5]),
        ([1], [2]),
        ([2, 5, 0], [2, 5, 0, 3]),
        ([2, 4, 0], [2, 5]),
        ([2, 5, 1], [2, 5, 0]),
    ],
)
def test_greedy(drafted: list[int], new: list[int]) -> None:
    rows = np.eye(6, dtype=np.float32)[[2, 5, 0, 3]]
    assert verify(rows[: len(drafted) + 1], Draft(tuple(drafted)), Sampler()) == new


def test_greedy_takes_no_notice_of_what_a_draft_was_drawn_from() -> None:
    rows = np.eye(6, dtype=np.float32)[[2, 5]]
    drawn_from = np.full((1, 6), 1 / 6)
    assert verify(rows, Draft((2,), "x", drawn_from), Sampler()) == [2, 5]
    assert verify(rows, Draft((3,), "x", drawn_from), Sampler()) == [2]


def outcomes(draft: tuple[int, ...], drawn_from: np.ndarray | None, sampler: Sampler) -> Counter:
    """How often every result of verifying came; drafts are drawn anew where they are drawn."""
    found: Counter[tuple[int, ...]] = Counter()
    source = np.random.default_rng(11)
    for _ in range(DRAWS):
        if drawn_from is not None:
            draft = tuple(int(source.choice(6, p=row)) for row in drawn_from)
        rows = LOGITS[: len(draft) + 1]
        found[tuple(verify(rows, Draft(draft, "x", drawn_from), sampler))] += 1
    return found


def probable(counts: Counter, expected: dict[tuple[int, ...], float]) -> bool:
    assert set(counts) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1)
    frequencies = [counts[key] for key in expected]
    return chisquare(frequencies, [p * DRAWS for p in expected.values()]).pvalue > 1e-3


@pytest.mark.parametrize("draft", [(0, 1), (3, 3), (int(LOGITS[0].argmin()), 0)])
def test_drafts_that_were_not_drawn(draft: tuple[int, ...]) -> None:
    p = softmax(LOGITS.astype(np.float64) / 0.8)
    expected = {(x,): p[0, x] for x in range(6) if x != draft[0]}
    expected |= {(draft[0], x): p[0, draft[0]] * p[1, x] for x in range(6) if x != draft[1]}
    both = p[0, draft[0]] * p[1, draft[1]]
    expected |= {(*draft, x): both * p[2, x] for x in range(6)}
    assert probable(outcomes(draft, None, Sampler(0.8, seed=5)), expected)


@pytest.mark.parametrize("likeness", [0.0, 0.5, 1.0], ids=["unlike", "half", "same"])
def test_the_first_token_of_drawn_drafts(likeness: float) -> None:
    """p, for a draft that is drawn from something else, or from p itself."""
    p = softmax(LOGITS.astype(np.float64))
    q = likeness * p[:1] + (1 - likeness) * softmax(RNG.normal(size=(1, 6)) * 2)
    counts = outcomes((), q, Sampler(1.0, seed=6))
    first: Counter[tuple[int, ...]] = Counter()
    for key, count in counts.items():
        first[key[:1]] += count
    assert probable(first, {(x,): p[0, x] for x in range(6)})
    accepted = sum(count for key, count in counts.items() if len(key) == 2) / DRAWS
    assert accepted == pytest.approx(np.minimum(p[0], q[0]).sum(), abs=0.02)
    after = Counter({key[1:]: 0 for key in counts if len(key) == 2})
    for key, count in counts.items():
        if len(key) == 2:
            after[key[1:]] += count
    total = sum(after.values())
    assert chisquare([after[(x,)] for x in range(6)], p[1] * total).pvalue > 1e-3


def test_what_the_filters_cut_is_never_accepted() -> None:
    sampler = Sampler(1.0, top_k=2, seed=1)
    worst = int(LOGITS[0].argmin())
    best = set(np.argsort(LOGITS[0])[-2:].tolist())
    assert {verify(LOGITS[:2], Draft((worst,)), sampler)[0] for _ in range(200)} == best
    assert {choose(LOGITS[0], worst, np.full(6, 1 / 6), sampler) for _ in range(200)} <= best


TREE = Draft((0, 1, 3, 0), "x", branches=(-1, -1, 0, 1))
"""0 or 1, then 3 after the 0, or 0 after the 1."""


@pytest.mark.parametrize(
    ("choices", "new"),
    [
        ([0, 3, 9, 4, 9], [0, 3, 4]),
        ([1, 9, 0, 9, 5], [1, 0, 5]),
        ([0, 2, 9, 9, 9], [0, 2]),
        ([1, 9, 3, 9, 9], [1, 3]),
        ([2, 9, 9, 9, 9], [2]),
    ],
)
def test_greedy_takes_the_branch_of_its_own_choices(choices: list[int], new: list[int]) -> None:
    """`choices` are the target's after the text, and after each drafted token."""
    rows = np.eye(10, dtype=np.float32)[choices]
    assert verify(rows, TREE, Sampler()) == new
    assert len(TREE.path(new)) == len(new) - 1


def test_a_tree_keeps_the_distribution() -> None:
    rows = np.vstack([LOGITS, LOGITS[:1] * 2]) / 4  # every outcome comes often enough to count
    p = softmax(rows.astype(np.float64) / 0.8)
    expected = {(x,): p[0, x] for x in range(2, 6)}
    for first, (row, drafted, after) in {0: (1, 3, 3), 1: (2, 0, 4)}.items():
        expected |= {(first, x): p[0, first] * p[row, x] for x in range(6) if x != drafted}
        both = p[0, first] * p[row, drafted]
        expected |= {(first, drafted, x): both * p[after, x] for x in range(6)}
    sampler, counts = Sampler(0.8, seed=5), Counter[tuple[int, ...]]()
    for _ in range(DRAWS):
        counts[tuple(verify(rows, TREE, sampler))] += 1
    assert probable(counts, expected)


def test_drafts_are_joined_where_they_agree() -> None:
    both = grafted(Draft((4, 5, 6), "a"), Draft((4, 5, 7, 8), "b"), 9)
    assert (both.tokens, both.parents, both.kind) == ((4, 5, 6, 7, 8), (-1, 0, 1, 1, 3), "a")
    assert grafted(Draft((4, 5, 6)), Draft((4, 5, 7, 8)), 4).tokens == (4, 5, 6, 7)
    assert grafted(Draft((4, 5)), Draft((4, 5, 7)), 3).parents == (-1, 0, 1)
    assert grafted(TREE, Draft((1, 2)), 5).parents == (-1, -1, 0, 1, 1)
    assert both.first(4).parents == (-1, 0, 1, 1)


def test_a_seed_gives_the_same_with_drafts_that_were_not_drawn() -> None:
    plain, drafting = Sampler(1.0, seed=9), Sampler(1.0, seed=9)
    expected = [plain(row) for row in LOGITS]
    assert verify(LOGITS, Draft(tuple(expected[:3])), drafting) == expected
