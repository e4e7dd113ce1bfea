"""The rewrites of attention: what they match, what they leave alone, and that values stay."""

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, agree, kinds, normal, rng, tape_agrees

from cetane.mil import load
from cetane.mil.fast import attend
from cetane.mil.fast.attend import exactly, quickly, seen_runs


def rotary(
    x: Any, cos: Any, sin: Any, cut: int = 2, sign: float = -1.0, swapped: bool = False
) -> Any:
    """x * cos + [sign * second, first] * sin over 4 channels on axis 2."""
    first = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, 2, cut, 3])
    second = mb.slice_by_index(x=x, begin=[0, 0, cut, 0], end=[1, 2, 4, 3])
    swapped = mb.concat(values=[mb.mul(x=second, y=np.float32(sign)), first], axis=2)
    straight, crossed = mb.mul(x=cos, y=x), mb.mul(x=swapped, y=sin)
    return mb.add(x=crossed, y=straight) if swapped else mb.add(x=straight, y=crossed)


SHAPES = {"x": ((1, 2, 4, 3), "fp32"), "cos": ((1, 1, 4, 3), "fp32"), "sin": ((1, 1, 4, 3), "fp32")}


def inputs() -> dict[str, np.ndarray]:
    return {name: normal(*shape) for name, (shape, _) in SHAPES.items()}


@pytest.mark.parametrize("swapped", [False, True])
def test_rotation(build: Build, swapped: bool) -> None:
    path = build(SHAPES, lambda x, cos, sin: rotary(x, cos, sin, swapped=swapped))
    assert "Gather" in kinds(load(path).functions["main"])
    given = inputs()
    (y,) = agree(path, **given)
    x = given["x"]
    swapped = np.concatenate([-x[:, :, 2:], x[:, :, :2]], 2)
    np.testing.assert_allclose(y, x * given["cos"] + swapped * given["sin"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("other", [{"cut": 1}, {"sign": 1.0}, {"sign": -2.0}], ids=str)
def test_other_turns_stay(build: Build, other: dict[str, Any]) -> None:
    path = build(SHAPES, lambda x, cos, sin: rotary(x, cos, sin, **other))
    assert "Gather" not in kinds(load(path).functions["main"])
    agree(path, **inputs())


def attention(q: Any, cache: Any, new: Any) -> Any:
    keys = mb.concat(values=[past_of(cache), new], axis=-1)
    weights = mb.softmax(x=mb.matmul(x=q, y=keys), axis=-1)
    return mb.matmul(x=weights, y=keys, transpose_y=True)


def past_of(cache: Any) -> Any:
    """The last layer of a cache: all of it, where there is one layer."""
    last = cache.shape[0] - 1
    if not last:
        return cache
    return mb.slice_by_index(x=cache, begin=[last, 0, 0, 0], end=[last + 1, 2, 4, 5])


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_past_is_not_copied(build: Build, tokens: int, layers: int) -> None:
    shapes = {"q": ((1, 2, 3, 4), "fp32"), "cache": ((layers, 2, 4, 5), "fp32")}
    path = build(shapes | {"new": ((1, 2, 4, tokens), "fp32")}, attention)
    assert kinds(load(path).functions["main"]).count("MatMul") == 4
    q, cache, new = normal(1, 2, 3, 4), normal(layers, 2, 4, 5), normal(1, 2, 4, tokens)
    (y,) = agree(path, q=q, cache=cache, new=new)
    keys = np.concatenate([cache[-1:], new], -1)
    weights = np.exp(q @ keys)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(y, weights @ keys.swapaxes(2, 3), rtol=1e-5, atol=1e-6)


def test_what_is_no_cache_is_joined(build: Build) -> None:
    """Two computed parts, and parts that are joined along another axis."""

    def computed(q: Any, new: Any) -> Any:
        both = mb.concat(values=[mb.relu(x=new), new], axis=-1)
        other = mb.concat(values=[new, new], axis=2)
        return mb.matmul(x=q, y=both), mb.matmul(x=mb.concat(values=[q, q], axis=-1), y=other)

    path = build({"q": ((1, 2, 3, 4), "fp32"), "new": ((1, 2, 4, 3), "fp32")}, computed)
    assert kinds(load(path).functions["main"]).count("MatMul") == 2
    agree(path, q=normal(1, 2, 3, 4), new=normal(1, 2, 4, 3))


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
    given: dict[str, np.ndarray], cap: float = 0.0, sinks: Any = None, how: Any = exactly
) -> Any:
    parts = [[given[f"{age} {name}"] for age in ("past", "new")] for name in ("keys", "values")]
    runs = seen_runs(given["mask"], [SLOTS, NEW])
    return how(given["rows"], *parts, given["mask"], runs, cap, sinks)


@pytest.mark.parametrize("how", [exactly, quickly])
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
    monkeypatch.setattr(attend, "SHARED", 0)
    monkeypatch.setattr(attend, "available", lambda: threads)
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


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_runs_between_graphs(
    build: Build, tokens: int, bounded: bool, layers: int
) -> None:
    def body(q: Any, cache: Any, new: Any, mask: Any) -> Any:
        keys = mb.concat(values=[past_of(cache), mb.mul(x=new, y=np.float32(2))], axis=-1)
        scores = mb.matmul(x=mb.mul(x=q, y=np.float32(0.5)), y=keys)
        if bounded:
            scores = mb.mul(x=mb.tanh(x=mb.mul(x=scores, y=np.float32(0.2))), y=np.float32(5))
        weights = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
        lifted = mb.matmul(x=mb.mul(x=weights, y=np.float32(16)), y=keys, transpose_y=True)
        return mb.relu(x=mb.mul(x=lifted, y=np.float32(1 / 16)))

    shapes = {"q": ((1, 2, 3, 4), "fp32"), "cache": ((layers, 2, 4, 5), "fp32")}
    shapes |= {"new": ((1, 2, 4, tokens), "fp32"), "mask": ((1, 1, 3, 5 + tokens), "fp32")}
    path = build(shapes, body)
    names = kinds(load(path).functions["main"])
    assert names.count("Attention") == 1 and not {"Softmax", "MatMul", "Concat"} & set(names)
    mask = np.where(rng.random((1, 1, 3, 5 + tokens)) < 0.4, -4e4, 0).astype(np.float32)
    mask[..., -1] = 0
    given = {name: normal(*shape) for name, (shape, _) in shapes.items()} | {"mask": mask}
    agree(path, **given)
    tape_agrees(path, **given)


def test_one_mask_for_keys_in_one_part_and_in_two(build: Build) -> None:
    """As where a layer takes keys from one that keeps them: Gemma 4 with caches of 8 bits."""

    def body(q: Any, cache: Any, new: Any, whole: Any, mask: Any) -> Any:
        past = mb.slice_by_index(x=cache, begin=[1, 0, 0, 0], end=[2, 2, 4, 5])
        results = []
        for keys in (mb.concat(values=[past, new], axis=-1), whole):
            weights = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=keys), y=mask), axis=-1)
            results.append(mb.matmul(x=weights, y=keys, transpose_y=True))
        return mb.add(x=results[0], y=results[1])

    shapes = {"q": ((1, 2, 3, 4), "fp32"), "cache": ((3, 2, 4, 5), "fp32")}
    shapes |= {"new": ((1, 2, 4, 3), "fp32"), "whole": ((1, 2, 4, 8), "fp32")}
    path = build(shapes | {"mask": ((1, 1, 3, 8), "fp32")}, body)
    assert kinds(load(path).functions["main"]).count("Attention") == 2
    draw = np.random.default_rng(6)
    given = {
        name: draw.normal(size=shape).astype(np.float32) for name, (shape, _) in shapes.items()
    }
    mask = np.full((1, 1, 3, 8), -4e4, np.float32)
    mask[..., 1:4] = mask[..., 5:7] = 0
    agree(path, **given, mask=mask)
    tape_agrees(path, **given, mask=mask)
