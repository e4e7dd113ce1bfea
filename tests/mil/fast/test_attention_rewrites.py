"""The rewrites of attention: what they match, what they leave alone, and that values stay."""

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, agree, kinds, normal, rng, tape_agrees

from cetane.mil import load


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
