"""Attention outside of graphs: by hand, and the same whatever threads, order and rows there are."""

from typing import Any

import numpy as np
import pytest
from tests.mil.fast.agreement import normal

from cetane.mil.fast import attention_stage
from cetane.mil.fast.attention_stage import by_kernel, by_products, seen_runs

HEADS, ROWS, DIM, SLOTS, NEW = 2, 3, 5, 40, 4


def operands() -> dict[str, np.ndarray]:
    """With 9 seen slots of a ring, two of four new columns that every row sees, and one more that
    only the last row sees. What no row sees is NaN."""
    mask = np.full((1, ROWS, SLOTS + NEW), -4e4, np.float32)
    mask[:, :, [*range(3), *range(34, 40), 40, 41]] = 0
    mask[:, 2, 42] = 0
    past = {name: normal(HEADS, DIM, SLOTS) for name in ("keys", "values")}
    new = {name: normal(HEADS, DIM, NEW) for name in ("keys", "values")}
    for name in past:
        past[name][..., 3:34] = np.nan
        new[name][..., 3] = np.nan
    return {
        "rows": normal(HEADS, ROWS, DIM), "mask": mask,
        **{f"past {n}": a for n, a in past.items()}, **{f"new {n}": a for n, a in new.items()},
    }  # fmt: skip


def by_hand(given: dict[str, np.ndarray], cap: float, sinks: np.ndarray | None) -> np.ndarray:
    joined = {
        name: np.concatenate([given[f"past {name}"], given[f"new {name}"]], -1).astype(np.float64)
        for name in ("keys", "values")
    }
    scores = given["rows"].astype(np.float64) @ np.nan_to_num(joined["keys"])
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(given["mask"] < 0, -np.inf, scores)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[..., None]], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., : SLOTS + NEW]
    return weights @ np.nan_to_num(joined["values"]).swapaxes(1, 2)


def run(
    given: dict[str, np.ndarray], cap: float = 0.0, sinks: Any = None, how: Any = by_kernel
) -> Any:
    parts = [[given[f"{age} {name}"] for age in ("past", "new")] for name in ("keys", "values")]
    runs = seen_runs(given["mask"], [SLOTS, NEW])
    return how(given["rows"], *parts, given["mask"], runs, cap, sinks)


@pytest.mark.parametrize("how", [by_kernel, by_products])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("sink", [False, True])
def test_attention_by_hand_reads_only_what_is_seen(how: Any, cap: float, sink: bool) -> None:
    given, sinks = operands(), normal(HEADS, ROWS) if sink else None
    result = run(given, cap, sinks, how)
    np.testing.assert_allclose(result, by_hand(given, cap, sinks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_rows_of_all_heads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's part ends in the middle of a head, and may be empty."""
    given, sinks = operands(), normal(HEADS, ROWS)
    alone = run(given, 2.0, sinks)
    monkeypatch.setattr(attention_stage, "SHARED", 0)
    monkeypatch.setattr(attention_stage, "available", lambda: threads)
    np.testing.assert_array_equal(run(given, 2.0, sinks), alone)


def test_exact_attention_has_no_order() -> None:
    """A ring turned by any number, a key that moves from the new columns into a slot, one row or
    several: the same bits."""
    given = operands()
    every = run(given)
    for turn in (1, 7, 31):
        turned = {n: np.roll(a, turn, -1) if n.startswith("past") else a for n, a in given.items()}
        past, new = np.split(given["mask"], [SLOTS], -1)
        turned["mask"] = np.concatenate([np.roll(past, turn, -1), new], -1)
        np.testing.assert_array_equal(run(turned), every)
    moved = {name: array.copy() for name, array in given.items()}
    for name in ("keys", "values"):
        moved[f"past {name}"][..., 20] = given[f"new {name}"][..., 1]
        moved[f"new {name}"][..., 1] = np.nan
    moved["mask"][..., 20], moved["mask"][..., 41] = 0, -4e4
    np.testing.assert_array_equal(run(moved), every)
    alone = given | {"rows": given["rows"][:, 1:2].copy(), "mask": given["mask"][:, 1:2].copy()}
    np.testing.assert_array_equal(run(alone), every[:, 1:2])


def test_a_row_that_sees_nothing_is_zeros() -> None:
    given = operands()
    given["mask"][:, 1] = -np.inf
    assert not run(given)[:, 1].any()
