"""How sure a draft head is: where its drafts end, and which kind they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.draft_heads.drafter import MedusaDrafter

RUNNER: Any = SimpleNamespace(vocabulary=np.array([7, 11, 13, 17]), times=None)


def rows(*chances: float) -> list[np.ndarray]:
    """Logits whose best token, at place 2, has these chances; the others share the rest."""
    return [np.log([(1 - c) / 3, (1 - c) / 3, c, (1 - c) / 3]).astype(np.float32) for c in chances]


@pytest.mark.parametrize(
    ("chances", "most", "tokens", "kind"),
    [
        ((0.9, 0.9, 0.9), 3, 3, "medusa-3"),
        ((0.9, 0.9, 0.9), 2, 2, "medusa-3"),
        ((0.6, 0.5, 0.9), 3, 3, "medusa-2"),  # 0.6, 0.3, 0.27
        ((0.6, 0.3, 0.9), 3, 2, "medusa-2"),  # 0.6, 0.18: the second is the last
        ((0.3, 0.9, 0.9), 3, 3, "medusa-1"),
        ((0.26, 0.5, 0.9), 3, 2, "medusa-1"),
        ((1.0, 0.9), 3, 2, "medusa-3"),
    ],
)  # fmt: skip
def test_a_draft_ends_where_it_is_unlikely(
    chances: tuple[float, ...], most: int, tokens: int, kind: str
) -> None:
    drafter = MedusaDrafter(RUNNER)
    drafter.unlikely = 0.2
    with np.errstate(divide="ignore"):
        draft = drafter.likely(rows(*chances), most)
    assert draft == Draft((13,) * tokens, kind)
    assert draft.drafter == "medusa"


@pytest.mark.parametrize(
    ("chances", "most", "tokens", "parents", "made"),
    [
        ((0.9, 0.9, 0.9), 3, (13, 13, 13), (-1, 0, 1), 3),
        ((0.6, 0.5, 0.3), 3, (13, 13, 7), (-1, 0, -1), 3),  # 0.6, 0.3, 0.133; not 0.09
        ((0.6, 0.5, 0.3), 4, (13, 13, 7, 11), (-1, 0, -1, -1), 3),
        ((0.4, 0.4, 0.9), 3, (13, 7, 11), (-1, -1, -1), 2),  # 0.4, 0.2, 0.2; 0.16 is unlikely
        ((0.28, 0.9, 0.9), 2, (13, 13), (-1, 0), 2),  # 0.28, 0.252; not 0.24
        ((0.25, 0.9, 0.9), 3, (7, 11, 13), (-1, -1, -1), 1),  # all alike: no later one can be among
        ((0.9, 0.9, 0.9), 9, (13,) * 3 + (7, 11, 17) * 2, (-1, 0, 1, -1, -1, -1, 0, 0, 0), 3),
    ],
)  # fmt: skip
def test_a_tree_holds_the_likeliest_tokens(
    chances: tuple[float, ...], most: int, tokens: tuple[int, ...], parents: tuple[int, ...],
    made: int,
) -> None:  # fmt: skip
    """The line of best tokens, and the second-best ones beside it, in the order of their chance."""
    drafter, left = MedusaDrafter(RUNNER), iter(rows(*chances))
    drafter.trees, drafter.unlikely = True, 0.2
    draft = drafter.likely(left, most)
    assert (draft.tokens, tuple(draft.parents)) == (tokens, parents)
    assert len(list(left)) == len(chances) - made


def test_a_row_that_is_no_number_ends_a_draft() -> None:
    drafter, broken = MedusaDrafter(RUNNER), np.full(4, np.nan, np.float32)
    for trees in (False, True):
        drafter.trees = trees
        assert drafter.likely([broken, *rows(0.9)], 3) == NO_DRAFT
        assert drafter.likely([*rows(0.9), broken], 1) == Draft((13,), "medusa-3")
        assert drafter.likely([*rows(0.9), broken, *rows(0.9)], 3).tokens[:1] == (13,)
    drafter.trees = False
    assert drafter.likely([*rows(0.9), broken, *rows(0.9)], 3).tokens == (13,)


@pytest.mark.parametrize(
    ("trees", "stop", "tokens", "parents"),
    [
        (False, (13,), (), ()),
        (False, (17,), (13, 13, 13), (-1, 0, 1)),
        (True, (13,), (7, 11, 17), (-1, -1, -1)),  # the second-best, and none after them
        (True, (7,), (13, 13, 13, 11, 17), (-1, 0, 1, -1, -1)),
    ],
)
def test_tokens_that_end_an_answer_are_not_drafted(
    trees: bool, stop: tuple[int, ...], tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    """Nothing follows them, and no further row is made."""
    drafter, left = MedusaDrafter(RUNNER), iter(rows(0.9, 0.9, 0.9))
    drafter.trees, drafter.stop, drafter.unlikely = trees, stop, 0.2
    draft = drafter.likely(left, 5)
    assert (draft.tokens, tuple(draft.parents)) == (tokens, parents)
    assert len(list(left)) == (2 if 13 in stop else 0)


def test_no_more_rows_are_made_than_drafted() -> None:
    """A row is a call."""
    made = []

    def calls():  # type: ignore[no-untyped-def]
        for chance in (0.9, 0.3, 0.9, 0.9):
            made.append(chance)
            yield rows(chance)[0]

    drafter = MedusaDrafter(RUNNER)
    drafter.unlikely = 0.2
    assert len(drafter.likely(calls(), 3).tokens) == 3  # 0.9, 0.27, 0.243
    assert made == [0.9, 0.3, 0.9]
    drafter.unlikely, made[:] = 0.5, []
    assert len(drafter.likely(calls(), 3).tokens) == 2
    assert made == [0.9, 0.3]
