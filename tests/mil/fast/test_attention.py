"""The rewrites of attention: what they match, what they leave alone, and that values stay."""

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, agree, kinds, normal

from cetane.mil import load
from cetane.mil.executor import compile
from cetane.mil.fast.fusion import order_kept, reshaped_once, rewritten


def rotary(
    x: Any, cos: Any, sin: Any, cut: int = 2, sign: float = -1.0, swapped: bool = False
) -> Any:
    """x * cos + [sign * second, first] * sin over 4 channels on axis 2."""
    first = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, 2, cut, 3])
    second = mb.slice_by_index(x=x, begin=[0, 0, cut, 0], end=[1, 2, 4, 3])
    turned = mb.concat(values=[mb.mul(x=second, y=np.float32(sign)), first], axis=2)
    straight, crossed = mb.mul(x=cos, y=x), mb.mul(x=turned, y=sin)
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
    turned = np.concatenate([-x[:, :, 2:], x[:, :, :2]], 2)
    np.testing.assert_allclose(y, x * given["cos"] + turned * given["sin"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("other", [{"cut": 1}, {"sign": 1.0}, {"sign": -2.0}], ids=str)
def test_other_turns_stay(build: Build, other: dict[str, Any]) -> None:
    path = build(SHAPES, lambda x, cos, sin: rotary(x, cos, sin, **other))
    assert "Gather" not in kinds(load(path).functions["main"])
    agree(path, **inputs())


def attention(q: Any, cache: Any, new: Any, layer: int = 1, axis: int = -1) -> Any:
    past = mb.slice_by_index(x=cache, begin=[layer, 0, 0, 0], end=[layer + 1, 2, 4, 5])
    keys = mb.concat(values=[past, new], axis=axis)
    weights = mb.softmax(x=mb.matmul(x=q, y=keys), axis=-1)
    return mb.matmul(x=weights, y=keys, transpose_y=True)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_past_is_not_copied(build: Build, tokens: int) -> None:
    shapes = {"q": ((1, 2, 3, 4), "fp32"), "cache": ((3, 2, 4, 5), "fp32")}
    path = build(shapes | {"new": ((1, 2, 4, tokens), "fp32")}, attention)
    assert kinds(load(path).functions["main"]).count("MatMul") == 4
    q, cache, new = normal(1, 2, 3, 4), normal(3, 2, 4, 5), normal(1, 2, 4, tokens)
    (y,) = agree(path, q=q, cache=cache, new=new)
    keys = np.concatenate([cache[1:2], new], -1)
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


def test_reshapes_and_transposes_of_one_token(build: Build) -> None:
    def body(x: Any) -> Any:
        rows = mb.transpose(x=mb.reshape(x=x, shape=[3, 2, 4, 1]), perm=[0, 1, 3, 2])
        real = mb.transpose(x=mb.reshape(x=x, shape=[1, 6, 4, 1]), perm=[0, 2, 1, 3])
        return mb.reshape(x=rows, shape=[1, 3, 2, 4]), real

    path = build({"x": ((1, 24, 1, 1), "fp32")}, body)
    function = load(path).functions["main"]
    once = rewritten(rewritten(function, order_kept), reshaped_once)
    assert kinds(once).count("Transpose") == 1
    assert kinds(once).count("Reshape") == 2
    x = {"x": normal(1, 24, 1, 1)}
    for mine, theirs in zip(
        compile(once, "fp32")(x).values(), compile(function, "fp32")(x).values(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
