"""Products with packed weights, against numpy: exact where 8 bits hold the activations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mil.fast.agreement import Build, kinds, normal

from cetane.bundle import Bundle
from cetane.mil import load
from cetane.mil.fast import FastProgram, packed

NARROW = {
    "int4": types.np_int4_dtype,
    "uint4": types.np_uint4_dtype,
    "int8": np.int8,
    "uint8": np.uint8,
}
LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)}


def in_8_bits(columns: int, tokens: int) -> np.ndarray:
    """Activations `(1, columns, 1, tokens)` that 8 bits hold: of 32, the largest is 127/64."""
    steps = np.random.default_rng(columns).integers(-127, 128, (columns, tokens))
    steps[::32] = 127
    return (steps / 64).astype(np.float16)[None, :, None]


def linear(
    rows: int, columns: int, dtype: str, blocks: int, offset: bool
) -> tuple[Any, np.ndarray]:
    """A maker of a linear weight, and its values `(rows, columns)`."""
    rng = np.random.default_rng(rows * columns + blocks)
    low, high = LIMITS[dtype]
    data = rng.integers(low, high + 1, (rows, columns, 1, 1))
    scale = (rng.random((rows, blocks, 1, 1)) + 0.5).astype(np.float16) / 64
    zero = rng.integers(low, high + 1, scale.shape) if offset else np.zeros(scale.shape, int)
    wide = [np.repeat(a, columns // blocks, axis=1) for a in (scale.astype(np.float64), zero)]

    def weight() -> Any:
        given = {"offset": zero.astype(NARROW[dtype])} if offset else {}
        return mb.constexpr_blockwise_shift_scale(
            data=data.astype(NARROW[dtype]), scale=scale, **given
        )

    return weight, (wide[0] * (data - wide[1])).reshape(rows, columns)


def fast(path: Any, **inputs: np.ndarray) -> list[np.ndarray]:
    return list(FastProgram(load(path), pack=True).function("main")(inputs).values())


@pytest.mark.parametrize("split", [False, True], ids=["whole", "nibbles"])
@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from(list(NARROW)),
    rows=st.sampled_from([1, 6, 33]),
    form=st.sampled_from([(8, 1), (32, 1), (72, 1), (96, 3), (128, 2)]),
    offset=st.booleans(),
    bias=st.booleans(),
    tokens=st.sampled_from([1, 2, 5, 8]),
)
def test_product(build: Build, split: bool, dtype: str, rows: int, form: tuple[int, int],
                 offset: bool, bias: bool, tokens: int) -> None:  # fmt: skip
    columns, blocks = form
    weight, values = linear(rows, columns, dtype, blocks, offset)
    more = {"bias": normal(rows).astype(np.float16)} if bias else {}
    path = build(
        {"x": ((1, columns, 1, tokens), "fp16")}, lambda x: mb.conv(x=x, weight=weight(), **more)
    )
    x = in_8_bits(columns, tokens)
    near = normal(1, columns, 1, tokens).astype(np.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "has_exact_8_bits", lambda: not split)
        assert "MatMulNBits" in kinds(load(path).functions["main"], pack=True)
        (y,), (rounded,) = fast(path, x=x), fast(path, x=near)
    assert y.shape == (1, rows, 1, tokens)
    truth, nearly = (
        a[0, :, 0].T.astype(np.float64) @ values.T + more.get("bias", 0) for a in (x, near)
    )
    np.testing.assert_allclose(y[0, :, 0].T, truth, rtol=1e-5, atol=1e-5 * np.abs(truth).max())
    # Others are half a step off, at most.
    step = np.abs(near).max() / 127
    bound = np.abs(values).sum(1) * step / 2 * 1.01 + 1e-3
    assert (np.abs(rounded[0, :, 0].T - nearly) <= bound).all()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "nibbles"])
@pytest.mark.parametrize("columns, tokens", [(64, 1), (72, 4)])
def test_a_palette_in_8_bits(
    build: Build, split: bool, columns: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is half a step off at most: of 32 inputs, the largest has 127 steps."""
    rows, each = 6, 3
    table = normal(rows // each, 1, 1, 1, 16, 1).astype(np.float16)
    codes = np.random.default_rng(columns).integers(0, 16, (rows, columns, 1, 1))

    def weight() -> Any:
        indices = codes.astype(types.np_uint4_dtype)
        return mb.constexpr_lut_to_dense(indices=indices, lut=table)

    path = build({"x": ((1, columns, 1, tokens), "fp16")}, lambda x: mb.conv(x=x, weight=weight()))
    monkeypatch.setattr(packed, "has_exact_8_bits", lambda: not split)
    assert "MatMulNBits" in kinds(load(path).functions["main"], pack=True)
    x = in_8_bits(columns, tokens)
    (y,) = fast(path, x=x)
    palettes = table.reshape(-1, 16).astype(np.float64).repeat(each, axis=0)
    values = np.take_along_axis(palettes, codes[:, :, 0, 0], 1)
    truth = x[0, :, 0].T.astype(np.float64) @ values.T
    bound = np.zeros_like(truth)
    for start in range(0, columns, packed.BLOCK):
        part = slice(start, start + packed.BLOCK)
        step = np.abs(values[:, part]).max(1) / 127
        bound += np.abs(x[0, part, 0]).sum(0)[:, None] * step / 2
    assert (np.abs(y[0, :, 0].T - truth) <= bound + 1e-3).all()
    rounded = np.abs(y[0, :, 0].T - truth)
    assert rounded.max() > 0  # palettes are no multiples of one scale


def test_the_kernel_of_this_processor() -> None:
    assert packed.has_exact_8_bits() in (True, False)


@pytest.mark.parametrize(
    "shape, weight",
    [
        ((1, 32, 1, 9), {}),  # many tokens
        ((1, 32, 2, 2), {}),  # an image
        ((2, 32, 1, 1), {}),  # a batch
        ((1, 32, 1, 4), {"blocks": 2}),  # blocks of 16
    ],
)
def test_other_products_stay(build: Build, shape: tuple[int, ...], weight: dict[str, int]) -> None:
    make, values = linear(6, 32, "int8", weight.get("blocks", 1), offset=False)
    path = build(
        {"x": (shape, "fp32")}, lambda x: mb.conv(x=mb.cast(x=x, dtype="fp16"), weight=make())
    )
    assert "MatMulNBits" not in kinds(load(path).functions["main"], pack=True)
    x = normal(*shape).astype(np.float16).astype(np.float32)
    (y,) = fast(path, x=x)
    half = values.astype(np.float16).astype(np.float64)  # what the program types them
    np.testing.assert_allclose(y, np.einsum("oc,nchw->nohw", half, x), rtol=1e-3, atol=1e-4)


def test_an_offset_between_integers_stays(build: Build) -> None:
    def body(x: Any) -> Any:
        half = np.full((6, 1, 1, 1), 0.5, np.float16)
        data = np.ones((6, 32, 1, 1), np.int8)
        return mb.conv(
            x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=half, offset=half)
        )

    path = build({"x": ((1, 32, 1, 1), "fp16")}, body)
    assert "MatMulNBits" not in kinds(load(path).functions["main"], pack=True)
    (y,) = fast(path, x=np.ones((1, 32, 1, 1), np.float16))
    np.testing.assert_array_equal(y.ravel(), 8.0)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
@pytest.mark.parametrize(
    "format_", ["int8-per-channel", "int8-per-tensor", "palette6-kmeans-group8"]
)
def test_layers(tiny_bundle: Callable[..., Bundle], order: str, format_: str) -> None:
    """Whole shards, residuals and norms on rows: as near to the exact ones as 8 bits allow, and
    nearer with the activations of 16."""
    bundle = tiny_bundle(compression={"default": format_}, tensor_layout=order)
    for shard in bundle.plan.shards:
        program = load(bundle.shard(shard.name))
        for name, function in program.functions.items():
            few = bundle.plan.functions[shard.name, name].tokens <= 8
            assert ("MatMulNBits" in kinds(function, pack=True)) == few
            given = {
                n: np.random.default_rng(1).standard_normal(t.static_shape).astype(np.float32)
                for n, t in function.inputs.items()
            }
            exact = FastProgram(program).function(name)(given)
            close = FastProgram(program, pack=True).function(name)(given)
            for output, truth in exact.items():
                error = np.abs(close[output] - truth).max() / np.abs(truth).max()
                assert error < (0.03 if few else 1e-5), (name, output)


def test_tokens_along_two_axes(build: Build) -> None:
    """`(1, C, 1, 2) + (1, C, 2, 1)` is an image, not rows."""
    make, values = linear(4, 32, "int8", 1, offset=False)

    def body(x: Any) -> Any:
        y = mb.conv(x=x, weight=make())
        turned = mb.conv(x=mb.transpose(x=x, perm=[0, 1, 3, 2]), weight=make())
        return mb.add(x=y, y=turned)

    path = build({"x": ((1, 32, 1, 2), "fp16")}, body)
    x = in_8_bits(32, 2)
    (y,) = fast(path, x=x)
    product = np.einsum("oc,nchw->nohw", values, x.astype(np.float64))
    np.testing.assert_allclose(y, product + product.swapaxes(2, 3), rtol=1e-5, atol=1e-4)
