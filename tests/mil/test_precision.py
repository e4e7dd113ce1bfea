"""What `cetane.mil.executor` claims of "fp16" precision, against numpy and scipy.

Ops of one tensor are tried with all 65,536 values; the others with anything that float16 can hold:
subnormals, both zeros, infinities, NaN, and what overflows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special

from cetane.mil import Executable, load

Build = Callable[..., Path]

SIZE = 16
UNIT = 2.0**-24
"""Half a step of float32 at 1: the largest relative error of one rounding."""

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
LARGEST, SMALLEST = np.float16(65504), np.float16(2.0**-24)
SPECIAL = np.array(
    [0, 1, 3, 1 / 3, 1023.5, 2048, 65472, LARGEST, SMALLEST, 2.0**-14, 6.1e-5, np.inf, np.nan], "f2"
)
SPECIALS = np.concatenate([SPECIAL, -SPECIAL])
BITS = st.one_of(st.integers(0, 2**16 - 1), st.sampled_from(SPECIALS.view("u2").tolist()))
VECTORS = arrays(np.uint16, SIZE, elements=BITS).map(lambda bits: bits.view(np.float16))
FINITE = BITS.filter(lambda bits: np.isfinite(np.uint16(bits).view(np.float16)))
ROWS = arrays(np.uint16, (4, SIZE), elements=FINITE).map(lambda bits: bits.view(np.float16))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what we try


def program(
    build: Build, inputs: dict[str, tuple[tuple[int, ...], str]], body: Callable[..., Any]
) -> Executable:
    return Executable(load(build(inputs, body)).functions["main"], "fp16")


def bits(x: Any) -> np.ndarray:
    """Of float16 values; all NaNs are one."""
    return np.where(np.isnan(x), np.float16(np.nan), x).astype(np.float16).view(np.uint16)


def ordinal(x: np.ndarray) -> np.ndarray:
    """Neighbouring float16 values have neighbouring numbers; both zeros have 0."""
    magnitude = (x.view(np.uint16) & 0x7FFF).astype(np.int32)
    return np.where(np.signbit(x), -magnitude, magnitude)


EPSILON = np.float16(0.007)
Unary = tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]

EXACT: dict[str, Unary] = {
    "negation": (lambda x: mb.mul(x=x, y=np.float16(-1)), np.negative),
    "abs": (lambda x: mb.abs(x=x), np.abs),
    "sign": (lambda x: mb.sign(x=x), np.sign),
    "floor": (lambda x: mb.floor(x=x), np.floor),
    "ceil": (lambda x: mb.ceil(x=x), np.ceil),
    "round": (lambda x: mb.round(x=x), np.rint),
    "square": (lambda x: mb.square(x=x), np.square),
    "sqrt": (lambda x: mb.sqrt(x=x), np.sqrt),
    "rsqrt": (lambda x: mb.rsqrt(x=x, epsilon=np.float16(0)), lambda x: 1 / np.sqrt(x + 0)),
    "rsqrt_epsilon": (
        lambda x: mb.rsqrt(x=x, epsilon=EPSILON),
        lambda x: 1 / np.sqrt(x + float(EPSILON)),
    ),
    "inverse": (lambda x: mb.inverse(x=x, epsilon=np.float16(0)), lambda x: 1 / (x + 0)),
    "inverse_epsilon": (
        lambda x: mb.inverse(x=x, epsilon=EPSILON),
        lambda x: 1 / (x + float(EPSILON)),
    ),
    "clip": (
        lambda x: mb.clip(x=x, alpha=np.float16(-0.3), beta=np.float16(700)),
        lambda x: np.clip(x, float(np.float16(-0.3)), 700),
    ),
}
"""Results are real arithmetic's, in float64, rounded once."""

CLOSE: dict[str, Unary] = {
    "acos": (lambda x: mb.acos(x=x), np.arccos),
    "asin": (lambda x: mb.asin(x=x), np.arcsin),
    "atan": (lambda x: mb.atan(x=x), np.arctan),
    "atanh": (lambda x: mb.atanh(x=x), np.arctanh),
    "cos": (lambda x: mb.cos(x=x), np.cos),
    "cosh": (lambda x: mb.cosh(x=x), np.cosh),
    "elu": (lambda x: mb.elu(x=x, alpha=np.float16(1)), lambda x: np.where(x > 0, x, np.expm1(x))),
    "erf": (lambda x: mb.erf(x=x), special.erf),
    "exp": (lambda x: mb.exp(x=x), np.exp),
    "exp2": (lambda x: mb.exp2(x=x), np.exp2),
    "gelu": (lambda x: mb.gelu(x=x, mode="EXACT"), lambda x: x * special.ndtr(x)),
    "gelu_sigmoid": (
        lambda x: mb.gelu(x=x, mode="SIGMOID_APPROXIMATION"),
        lambda x: x * special.expit(1.702 * x),
    ),
    "gelu_tanh": (  # (1 + tanh(z)) / 2 is the logistic function of 2z
        lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
        lambda x: x * special.expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    ),
    "log": (lambda x: mb.log(x=x, epsilon=np.float16(0)), np.log),
    "relu": (lambda x: mb.relu(x=x), lambda x: np.maximum(x, 0)),  # either zero, else exact
    "sigmoid": (lambda x: mb.sigmoid(x=x), special.expit),
    "silu": (lambda x: mb.silu(x=x), lambda x: x * special.expit(x)),
    "sin": (lambda x: mb.sin(x=x), np.sin),
    "sinh": (lambda x: mb.sinh(x=x), np.sinh),
    "softplus": (lambda x: mb.softplus(x=x), lambda x: np.logaddexp(x, 0)),
    "softsign": (lambda x: mb.softsign(x=x), lambda x: x / (1 + np.abs(x))),
    "tan": (lambda x: mb.tan(x=x), np.tan),
    "tanh": (lambda x: mb.tanh(x=x), np.tanh),
}


@pytest.fixture(scope="module")
def of_every_value(build: Build) -> dict[str, np.ndarray]:
    """What each op of one tensor gives for every float16."""
    ops = EXACT | CLOSE
    run = program(build, {"x": (EVERY.shape, "fp16")}, lambda x: [op(x) for op, _ in ops.values()])
    return dict(zip(ops, run({"x": EVERY}).values(), strict=True))


@pytest.mark.parametrize("op", EXACT)
def test_exact_for_every_value(of_every_value: dict[str, np.ndarray], op: str) -> None:
    truth = EXACT[op][1](EVERY.astype(np.float64))
    np.testing.assert_array_equal(bits(of_every_value[op]), bits(truth))


@pytest.mark.parametrize("op", CLOSE)
def test_one_ulp_for_every_value(of_every_value: dict[str, np.ndarray], op: str) -> None:
    found, truth = of_every_value[op], CLOSE[op][1](EVERY.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(truth))
    away = np.abs(ordinal(found) - ordinal(truth))[~np.isnan(truth)]
    assert away.max() <= (op != "relu")


ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "real_div": np.divide,
}
EITHER_ZERO = {
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
COMPARISONS = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}


def all_binary(x: Any, y: Any) -> list[Any]:
    """Every op of two tensors, then a choice between their elements."""
    numbers = [getattr(mb, op)(x=x, y=y) for op in ARITHMETIC | EITHER_ZERO]
    choices = [getattr(mb, op)(x=x, y=y) for op in COMPARISONS]
    return [
        *numbers,
        *(mb.cast(x=choice, dtype="fp16") for choice in choices),
        mb.select(cond=choices[2], a=x, b=y),
    ]


@pytest.fixture(scope="module")
def binary(build: Build) -> Executable:
    return program(build, {"x": ((SIZE,), "fp16"), "y": ((SIZE,), "fp16")}, all_binary)


def check_binary(binary: Executable, x: np.ndarray, y: np.ndarray) -> None:
    *numbers, chosen = binary({"x": x, "y": y}).values()
    functions = ARITHMETIC | EITHER_ZERO | COMPARISONS
    for (op, function), found in zip(functions.items(), numbers, strict=True):
        assert found.dtype == np.float16
        truth = function(x, y).astype(np.float16)
        if op in EITHER_ZERO:
            np.testing.assert_array_equal(found, truth, err_msg=f"{op}({x}, {y})")
        else:
            np.testing.assert_array_equal(bits(found), bits(truth), err_msg=f"{op}({x}, {y})")
    np.testing.assert_array_equal(bits(chosen), bits(np.where(x < y, x, y)))


@given(x=VECTORS, y=VECTORS)
@settings(max_examples=200)
def test_pairs(binary: Executable, x: np.ndarray, y: np.ndarray) -> None:
    check_binary(binary, x, y)


def test_every_pair_of_special_values(binary: Executable) -> None:
    for value in SPECIALS:
        for part in (SPECIALS[:SIZE], SPECIALS[-SIZE:]):
            check_binary(binary, np.full(SIZE, value), part)


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")


@pytest.fixture(scope="module")
def casts(build: Build) -> Executable:
    def body(x: Any) -> list[Any]:
        whole = [mb.cast(x=mb.cast(x=x, dtype=kind), dtype="int32") for kind in INTEGERS]
        truth = mb.cast(x=mb.cast(x=x, dtype="bool"), dtype="int32")
        return [*whole, truth, mb.cast(x=x, dtype="fp32")]

    return program(build, {"x": (EVERY.shape, "fp16")}, body)


def test_casts_from_every_value(casts: Executable) -> None:
    """To integers: towards zero, to the nearest end where there is none, NaN to 0."""
    *whole, truth, wide = casts({"x": EVERY}).values()
    for kind, found in zip(INTEGERS, whole, strict=True):
        limits = np.iinfo(kind)
        expected = np.clip(np.trunc(EVERY.astype(np.float64)), limits.min, limits.max)
        np.testing.assert_array_equal(found, np.nan_to_num(expected).astype(np.int32), kind)
    np.testing.assert_array_equal(truth, EVERY != 0)
    np.testing.assert_array_equal(wide, EVERY.astype(np.float32))


@pytest.fixture(scope="module")
def casts_to_halves(build: Build) -> Executable:
    inputs = {"f": ((SIZE,), "fp32"), "i": ((SIZE,), "int32")}
    return program(build, inputs, lambda **xs: [mb.cast(x=x, dtype="fp16") for x in xs.values()])


FLOATS = st.floats(width=32) | st.floats(-66000, 66000, width=32)
WHOLE = st.integers(-(2**31), 2**31 - 1) | st.integers(-70000, 70000)


@given(wide=arrays(np.float32, SIZE, elements=FLOATS), whole=arrays(np.int32, SIZE, elements=WHOLE))
@example(  # ties: to even, into the normal values, and out of the range
    wide=np.resize(np.float32([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 65519.99, 65520]), SIZE),
    whole=np.resize(np.int32([2049, 2051, 65519, 65520, -65520]), SIZE),
)
@settings(max_examples=200)
def test_casts_to_halves(casts_to_halves: Executable, wide: np.ndarray, whole: np.ndarray) -> None:
    from_wide, from_whole = casts_to_halves({"f": wide, "i": whole}).values()
    np.testing.assert_array_equal(bits(from_wide), bits(wide.astype(np.float16)))
    np.testing.assert_array_equal(bits(from_whole), bits(whole.astype(np.float16)))


WEIGHT = np.random.default_rng(0).standard_normal((4, SIZE)).astype(np.float16)
Sum = tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]
SUMS: dict[str, Sum] = {  # the op, and the terms that it adds up along the last axis
    "reduce_sum": (lambda x: mb.reduce_sum(x=x, axes=[1]), lambda x: x),
    "reduce_mean": (lambda x: mb.reduce_mean(x=x, axes=[1]), lambda x: x / SIZE),
    "reduce_l1_norm": (lambda x: mb.reduce_l1_norm(x=x, axes=[1]), np.abs),
    "reduce_sum_square": (lambda x: mb.reduce_sum_square(x=x, axes=[1]), np.square),
    "matmul": (
        lambda x: mb.matmul(x=x, y=x, transpose_y=True),
        lambda x: x[:, None] * x[None],
    ),
    "linear": (
        lambda x: mb.linear(x=x, weight=WEIGHT, bias=WEIGHT[:, 0]),
        lambda x: np.concatenate(
            [x[:, None] * WEIGHT, np.broadcast_to(WEIGHT[:, :1], (4, 4, 1))], axis=-1
        ),
    ),
    "conv": (
        lambda x: mb.conv(
            x=mb.expand_dims(x=x, axes=[2]), weight=WEIGHT[:, :, None], pad_type="valid"
        ),
        lambda x: (x[:, None] * WEIGHT)[:, :, None],
    ),
}


@pytest.fixture(scope="module")
def sums(build: Build) -> Executable:
    def body(x: Any) -> list[Any]:
        ends = [mb.reduce_max(x=x, axes=[1]), mb.reduce_min(x=x, axes=[1])]
        return [*(op(x) for op, _ in SUMS.values()), *ends]

    return program(build, {"x": ((4, SIZE), "fp16")}, body)


def assert_rounded(found: np.ndarray, truth: np.ndarray, error: np.ndarray | float) -> None:
    """`found` is what some number at most `error` away from the truth rounds to."""
    assert found.dtype == np.float16
    assert ((truth - error).astype(np.float16) <= found).all()
    assert (found <= (truth + error).astype(np.float16)).all()


@given(x=ROWS)
@settings(max_examples=200)
def test_sums_are_those_of_float32(sums: Executable, x: np.ndarray) -> None:
    *found, highest, lowest = sums({"x": x}).values()
    for (op, (_, terms)), value in zip(SUMS.items(), found, strict=True):
        added = terms(x.astype(np.float64))
        error = (SIZE + 2) * UNIT * np.abs(added).sum(-1)
        assert_rounded(value, added.sum(-1), error)
        if (added >= 0).all():  # nothing cancels
            truth = added.sum(-1).astype(np.float16)
            assert np.abs(ordinal(value) - ordinal(truth)).max() <= 1, op
    np.testing.assert_array_equal(highest, x.max(1))
    np.testing.assert_array_equal(lowest, x.min(1))


@pytest.fixture(scope="module")
def normalizations(build: Build) -> Executable:
    def body(x: Any) -> list[Any]:
        norm = mb.layer_norm(x=x, axes=[1], gamma=WEIGHT[0], beta=WEIGHT[1], epsilon=np.float16(0))
        return [mb.softmax(x=x, axis=1), norm]

    return program(build, {"x": ((4, SIZE), "fp16")}, body)


@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([2.0**-12, 0.1, 1, 30, 8000]),
    offset=st.sampled_from([0.0, 1, -3]),
)
@settings(max_examples=200)
def test_normalizations(normalizations: Executable, seed: int, scale: float, offset: float) -> None:
    noise = np.random.default_rng(seed).standard_normal((4, SIZE))
    half = np.clip(scale * (noise + offset), -65504, 65504).astype(np.float16)
    x = half.astype(np.float64)
    softmax, norm = normalizations({"x": half}).values()
    truth = special.softmax(x, 1)
    # exp of a difference that was rounded, which is 104 at most where the result is not 0
    assert_rounded(softmax, truth, (SIZE + 120) * UNIT * truth)
    centred, spread = x - x.mean(1, keepdims=True), x.std(1, keepdims=True)
    truth = centred / spread * WEIGHT[0] + WEIGHT[1].astype(np.float64)
    centring = np.abs(x).max(1, keepdims=True) / spread * np.abs(WEIGHT[0])
    assert_rounded(norm, truth, 2 * SIZE * UNIT * (centring + np.abs(truth) + np.abs(WEIGHT[1])))


def chain(x: Any) -> Any:
    """1/3 in fp16, cast to fp32, tripled there."""
    third = mb.real_div(x=x, y=np.float16(3))
    return mb.mul(x=mb.cast(x=third, dtype="fp32"), y=np.float32(3))


@pytest.mark.parametrize(("precision", "third"), [("fp16", np.float16(1) / 3), ("fp32", 1 / 3)])
def test_only_fp16_values_are_rounded(build: Build, precision: Any, third: float) -> None:
    run = Executable(load(build({"x": ((1,), "fp16")}, chain)).functions["main"], precision)
    (output,) = run({"x": np.ones(1, np.float16)}).values()
    assert output.dtype == np.float32
    assert output == np.float32(3) * np.float32(third)


def test_a_sum_is_accumulated_in_float32(build: Build) -> None:
    # In float16 the sum would stop at 2048, where adding 1 no longer changes it.
    run = program(
        build, {"x": ((4096,), "fp16")}, lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=True)
    )
    (output,) = run({"x": np.ones(4096)}).values()
    assert output == 4096


def test_inputs_are_rounded_to_their_declared_type(build: Build) -> None:
    function = load(build({"x": ((1,), "fp16")}, lambda x: mb.identity(x=x))).functions["main"]
    x = np.array([1.0001], np.float32)
    assert next(iter(Executable(function, "fp16")({"x": x}).values())) == 1
    assert next(iter(Executable(function, "fp32")({"x": x}).values())) == x


@pytest.mark.parametrize("x", [1 + 2.0**-11 + 2.0**-40, 65520 - 2.0**-20, -(2.0**-25) - 2.0**-60])
def test_double_inputs_are_rounded_once(build: Build, x: float) -> None:
    """By way of float32 each of these would be a tie, and go to the other side."""
    run = program(build, {"x": ((1,), "fp16")}, lambda x: mb.identity(x=x))
    (output,) = run({"x": np.array([x])}).values()
    assert output == np.float16(x) != np.float16(np.float32(x))
