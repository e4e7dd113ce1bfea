"""The rewrites: what they match, what they leave alone, and that values stay."""

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mil.fast.agreement import Build, agree, kinds, normal, tape_agrees

from cetane.mil import load
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.translate import translate


def doubled_norm(
    x: Any, axis: int = 1, factor: float = -1.0, half: int = 0, axes: list[int] | None = None
) -> Any:
    """A layer_norm of [x, factor * x] over 6 channels, of which one half is taken."""
    both = mb.concat(values=[x, mb.mul(x=x, y=np.float32(factor))], axis=axis)
    normed = mb.layer_norm(x=both, axes=axes or [axis], epsilon=np.float32(0.1))
    begin, end = [0] * 3, [0] * 3
    begin[axis], end[axis] = 6 * half, 6 * (half + 1)
    mask = [a != axis for a in range(3)]
    return mb.slice_by_index(x=normed, begin=begin, end=end, begin_mask=mask, end_mask=mask)


@pytest.mark.parametrize("axis", [1, 2])
def test_rms_norm(build: Build, axis: int) -> None:
    shape = (2, 6, 5) if axis == 1 else (2, 5, 6)
    path = build({"x": (shape, "fp32")}, lambda x: doubled_norm(x, axis))
    assert "Concat" not in kinds(load(path).functions["main"])
    x = normal(*shape)
    (y,) = agree(path, x=x)
    rms = np.sqrt((x**2).mean(axis, keepdims=True) + 0.1)
    np.testing.assert_allclose(y, x / rms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 6, 1, 5), (2, 5, 6, 1), (1, 6, 5, 4)], ids=str)
def test_layer_norm(build: Build, shape: tuple[int, ...]) -> None:
    gains, biases = normal(shape[1], 1, 1), normal(1, shape[1], 1, 1)

    def body(x: Any) -> Any:
        normed = mb.layer_norm(x=x, axes=[1], epsilon=np.float32(0.1))
        return mb.add(x=mb.mul(x=normed, y=gains), y=biases)

    path = build({"x": (shape, "fp32")}, body)
    x = normal(*shape) + 3
    (y,) = agree(path, x=x)
    tape_agrees(path, x=x)
    std = np.sqrt(x.var(1, keepdims=True) + 0.1)
    expected = (x - x.mean(1, keepdims=True)) / std * gains + biases
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [{"factor": -2.0}, {"half": 1}, {"axes": [1, 2]}], ids=str)
def test_norms_of_something_else_stay(build: Build, other: dict[str, Any]) -> None:
    path = build({"x": ((2, 6, 5), "fp32")}, lambda x: doubled_norm(x, **other))
    assert "Concat" in kinds(load(path).functions["main"])
    agree(path, x=normal(2, 6, 5))


def convolutions(x: Any, *forms: dict[str, Any], bias: bool = False) -> list[Any]:
    """One convolution of `x` for each form, with 2, 3, ... output channels."""
    return [
        mb.conv(
            x=x,
            weight=normal(2 + index, 3, 1, 1),
            **form,
            **({"bias": normal(2 + index)} if bias else {}),
        )
        for index, form in enumerate(forms)
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_of_the_same_input_are_merged(build: Build, bias: bool) -> None:
    path = build({"x": ((1, 3, 1, 5), "fp32")}, lambda x: convolutions(x, {}, {}, {}, bias=bias))
    assert kinds(load(path).functions["main"]).count("Conv") == 1
    assert [y.shape[1] for y in agree(path, x=normal(1, 3, 1, 5))] == [2, 3, 4]


def test_convolutions_of_other_forms_stay_apart(build: Build) -> None:
    path = build({"x": ((1, 3, 4, 4), "fp32")}, lambda x: convolutions(x, {}, {"strides": [2, 2]}))
    assert kinds(load(path).functions["main"]).count("Conv") == 2
    agree(path, x=normal(1, 3, 4, 4))


def test_grouped_convolutions_stay_apart(build: Build) -> None:
    def body(x: Any) -> Any:
        return [mb.conv(x=x, weight=normal(6, 1, 1, 1), groups=3) for _ in range(2)]

    path = build({"x": ((1, 3, 1, 5), "fp32")}, body)
    assert kinds(load(path).functions["main"]).count("Conv") == 2
    agree(path, x=normal(1, 3, 1, 5))


@settings(max_examples=12)
@given(st.data())
def test_parts_of_an_input(build: Build, data: st.DataObject) -> None:
    """Parts of the first axis are views; whatever the part, values are those of numpy."""
    axis = data.draw(st.integers(0, 1))
    begin = data.draw(st.integers(-4, 3))
    end = data.draw(st.integers(begin % 4 + 1, 4))
    at_end = data.draw(st.booleans())

    def body(x: Any) -> Any:
        begins, ends = [0, 0], [4, 4]
        begins[axis], ends[axis] = begin, end
        masks = [at_end and a == axis for a in range(2)]
        return mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=masks)

    path = build({"x": ((4, 4), "fp32")}, body)
    x = normal(4, 4)
    part = slice(begin, None if at_end else end)
    (y,) = agree(path, x=x)
    np.testing.assert_array_equal(y, x[part] if axis == 0 else x[:, part])
    views = translate(fuse(load(path).functions["main"])).views
    assert bool(views) == (axis == 0 and x[part].shape != x.shape)


@pytest.mark.parametrize(
    ("factors", "left"), [((32.0, 1 / 32), 0), ((8.0, 4.0), 1), ((3.0, 2.0), 2)]
)
def test_factors_that_are_powers_of_two_are_joined(
    build: Build, factors: tuple[float, float], left: int
) -> None:
    """Others round twice, so they stay."""

    def body(x: Any) -> Any:
        inner = mb.mul(x=x, y=np.float32(factors[0]))
        return mb.mul(x=np.float32(factors[1]), y=inner), mb.relu(x=inner)

    path = build({"x": ((2, 3), "fp32")}, body)
    x = normal(2, 3)
    y, positive = agree(path, x=x)
    np.testing.assert_array_equal(y, x * np.float32(factors[0]) * np.float32(factors[1]))
    np.testing.assert_array_equal(positive, np.maximum(x * np.float32(factors[0]), 0))
    alone = build({"x": ((2, 3), "fp32")}, lambda x: body(x)[0])
    assert kinds(load(alone).functions["main"]).count("Mul") == left


def test_fusing_leaves_the_interface(build: Build) -> None:
    function = load(build({"x": ((2, 6, 5), "fp32")}, doubled_norm)).functions["main"]
    fused = fuse(function)
    assert (fused.inputs, fused.outputs) == (function.inputs, function.outputs)
