"""Products with weights as they are stored, against numpy, in every form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.mil.fast.agreement import Build, normal

from cetane.mil import load
from cetane.mil.fast import FastProgram
from cetane.mil.fast.dots import MOST, MOST_ENTRY
from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.forms import DOTTED, READABLE, WeightForm
from cetane.mil.fast.tape.model import TapeModel
from cetane.mil.fast.tape.products import MANY

NARROW = {
    "int4": types.np_int4_dtype,
    "uint4": types.np_uint4_dtype,
    "int8": np.int8,
    "uint8": np.uint8,
}
LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255)}
TOKENS = st.sampled_from([1, 2, 4, 5, 8, MANY, 24, 64])


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


def palettes(rows: int, columns: int, bits: int, group: int) -> tuple[Any, np.ndarray]:
    """A maker of a palettized weight, and its values."""
    rng = np.random.default_rng(rows + columns + bits)
    table = rng.standard_normal((rows // group, 1, 1, 1, 2**bits, 1)).astype(np.float16)
    codes = rng.integers(0, 2**bits, (rows, columns, 1, 1))
    narrow = {1: types.np_uint1_dtype, 2: types.np_uint2_dtype, 3: types.np_uint3_dtype,
              4: types.np_uint4_dtype, 6: types.np_uint6_dtype, 8: np.uint8}[bits]  # fmt: skip

    def weight() -> Any:
        return mb.constexpr_lut_to_dense(indices=codes.astype(narrow), lut=table)

    wide = table.reshape(-1, 2**bits).astype(np.float64).repeat(group, axis=0)
    return weight, np.take_along_axis(wide, codes[:, :, 0, 0], 1)


def compiled(
    build: Build, weight: Any, shape: tuple[int, ...], **more: Any
) -> Callable[[np.ndarray], np.ndarray]:
    """A tape that multiplies inputs of a shape with a weight: the result is (tokens, rows)."""
    path = build({"x": (shape, "fp16")}, lambda x: mb.conv(x=x, weight=weight(), **more))
    program = FastProgram(load(path), pack=True)
    assert isinstance(program.shared("main"), TapeModel)

    def run(x: np.ndarray) -> np.ndarray:
        (y,) = program.function("main")({"x": x}).values()
        return y[0, :, 0].T

    return run


def product(build: Build, weight: Any, x: np.ndarray, **more: Any) -> np.ndarray:
    """The result (tokens, rows) of a tape."""
    return compiled(build, weight, x.shape, **more)(x)


def inputs(columns: int, tokens: int) -> np.ndarray:
    return normal(1, columns, 1, tokens).astype(np.float16)


def doubt(x: np.ndarray, values: np.ndarray, looked_up: bool) -> np.ndarray:
    """How far a result may be off where inputs are rounded to words: half a step of each input, and
    half a step of each entry of a palette."""
    if not DOTTED:
        return np.zeros((len(x), len(values)))
    filled = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % BLOCK)))
    bound = filled.reshape(len(x), -1, BLOCK).max(-1).repeat(BLOCK, axis=1)[:, : x.shape[1]]
    result = bound / MOST / 2 @ np.abs(values.T)
    if looked_up:
        step = np.abs(values).max() / MOST_ENTRY
        result += (np.abs(x).sum(1) * step / 2)[:, None]
    return result


def check(
    y: np.ndarray, x: np.ndarray, values: np.ndarray, bias: Any = 0, looked_up: bool = False
) -> None:
    rows = x[0, :, 0].T.astype(np.float64)
    truth = rows @ values.T + bias
    limit = 1e-5 * np.abs(truth) + 2e-6 * np.abs(values).max() * len(x[0])
    assert (np.abs(y - truth) <= limit + 1.01 * doubt(rows, values, looked_up)).all()


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(list(NARROW)),
    rows=st.sampled_from([1, 6, 33, 64]),
    form=st.sampled_from([(8, 1), (32, 1), (72, 1), (96, 3), (128, 2), (64, 4)]),
    offset=st.booleans(),
    bias=st.booleans(),
    tokens=TOKENS,
)
def test_linear(build: Build, dtype: str, rows: int, form: tuple[int, int], offset: bool,
                bias: bool, tokens: int) -> None:  # fmt: skip
    """They lose nothing but the roundings of inputs, whatever their zero points and blocks."""
    columns, blocks = form
    weight, values = linear(rows, columns, dtype, blocks, offset)
    more = {"bias": normal(rows).astype(np.float16)} if bias else {}
    x = inputs(columns, tokens)
    y = product(build, weight, x, **more)
    check(y, x, values, more.get("bias", 0))


@settings(max_examples=12)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 6]), group=st.sampled_from([8, 16, 32]), tokens=TOKENS,
    columns=st.sampled_from([8, 64, 104]),
)  # fmt: skip
def test_small_palettes_stay_palettes(
    build: Build, bits: int, group: int, tokens: int, columns: int
) -> None:
    assume((WeightForm.NIBBLES if bits <= 4 else WeightForm.SIXES) in READABLE)
    weight, values = palettes(32, columns, bits, group)
    x = inputs(columns, tokens)
    check(product(build, weight, x), x, values, looked_up=True)


@pytest.mark.parametrize("tokens", [1, 4])
def test_large_palettes_are_rounded_to_8_bits(build: Build, tokens: int) -> None:
    """Half a step off at most: of 32 inputs, the largest has 127 steps."""
    weight, values = palettes(32, 64, 8, 8)
    x = inputs(64, tokens)
    y = product(build, weight, x)
    truth = x[0, :, 0].T.astype(np.float64) @ values.T
    bound = np.zeros_like(truth)
    for start in range(0, 64, BLOCK):
        part = slice(start, start + BLOCK)
        step = np.abs(values[:, part]).max(1) / 127
        bound += np.abs(x[0, part, 0]).sum(0)[:, None] * step / 2
    assert (np.abs(y - truth) <= bound + 1e-3).all()
    assert np.abs(y - truth).max() > 1e-4


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_stays_none(build: Build, wrong: float) -> None:
    """It spoils its own token's results, and no other's."""
    weight, _ = linear(33, 64, "int8", 1, False)
    x = inputs(64, 24)
    x[0, 40, 0, 5] = wrong
    y = product(build, weight, x)
    assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


@pytest.mark.parametrize("live", [3, 5, 7])
@pytest.mark.parametrize("kind", ["int8", "palette6"])
def test_rows_of_padding_give_zeros(build: Build, kind: str, live: int) -> None:
    """A call leaves them out, and another row of zeros is none of them."""
    weight = (
        palettes(32, 64, 6, 8)[0] if kind == "palette6" else linear(33, 64, "int8", 1, False)[0]
    )
    x = inputs(64, 8)
    run = compiled(build, weight, x.shape)
    every = run(x)
    x[..., live:], x[..., 1] = 0, 0
    y = run(x)
    assert not y[live:].any() and not y[1].any()
    others = [0, *range(2, live)]
    np.testing.assert_array_equal(y[others], every[others])


def test_a_palette_of_a_matrix(build: Build) -> None:
    """Of as many rows as no group has."""
    weight, values = palettes(6, 32, 4, 6)
    x = inputs(32, 3)
    check(product(build, weight, x), x, values, looked_up=True)


def test_plain_weights(build: Build) -> None:
    values = normal(10, 40).astype(np.float16)
    x = inputs(40, 5)
    check(product(build, lambda: values[:, :, None, None], x), x, values.astype(np.float64))


@pytest.mark.parametrize("kind", ["int8", "blocks", "int4", "palette4", "palette6", "plain"])
def test_a_token_is_the_same_alone_and_among_others(build: Build, kind: str) -> None:
    """Bit for bit."""
    makers = {
        "int8": lambda: linear(33, 104, "int8", 1, False)[0],
        "blocks": lambda: linear(33, 96, "int8", 3, False)[0],
        "int4": lambda: linear(33, 104, "int4", 1, False)[0],
        "palette4": lambda: palettes(32, 104, 4, 8)[0],
        "palette6": lambda: palettes(32, 104, 6, 8)[0],
        "plain": lambda: lambda: normal(33, 104, 1, 1).astype(np.float16),
    }
    x = inputs(96 if kind == "blocks" else 104, 40)
    weight = makers[kind]()
    fixed = weight() if kind == "plain" else None
    maker = (lambda: fixed) if kind == "plain" else weight
    every = product(build, maker, x)
    for first, tokens in ((0, 1), (7, 3), (3, 4), (2, 13), (5, 25)):
        part = product(build, maker, x[..., first : first + tokens])
        np.testing.assert_array_equal(part, every[first : first + tokens])


def test_joined_weights(build: Build) -> None:
    """Convolutions of one input become one product, also of several forms."""
    whole, whole_values = linear(8, 64, "int8", 1, False)
    short, short_values = palettes(6, 64, 4, 6)
    float_ = normal(5, 64).astype(np.float16)

    def body(x: Any) -> Any:
        weights = (whole(), short(), short(), float_[:, :, None, None])
        return [mb.conv(x=x, weight=weight) for weight in weights]

    path = build({"x": ((1, 64, 1, 2), "fp16")}, body)
    x = inputs(64, 2)
    results = FastProgram(load(path), pack=True).function("main")({"x": x}).values()
    truths = (whole_values, short_values, short_values, float_.astype(np.float64))
    for y, values in zip(results, truths, strict=True):
        truth = np.einsum("oc,nchw->nohw", values, x.astype(np.float64))
        np.testing.assert_allclose(y, truth, rtol=2e-3, atol=2e-2)
