"""Programs at the edge of what graphs and tapes take: they compute what the reference does, or
refuse. The tapes' loops check nothing themselves."""

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, agree, normal
from tests.mil.programs import constant, op, program

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram
from cetane.mil.program import Op, StoredConstant, TensorType


def both(path: Any, **inputs: np.ndarray) -> None:
    """Graphs and tapes agree with the reference."""
    agree(path, **inputs)
    agree(path, pack=True, **inputs)


ROWS = {"q": (1, 2, 3, 8), "k": (1, 2, 8, 5), "m": (1, 1, 3, 5), "v": (1, 2, 4, 5)}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"v": (1, 1, 4, 5)},  # values that all heads share
        {"q": (1, 1, 3, 8), "k": (1, 1, 8, 5), "m": (1, 4, 3, 5), "v": (1, 4, 4, 5)},
        {"q": (1, 2, 1, 8)},  # a mask of more rows
        {"v": (2, 2, 4, 5)},
    ],
    ids=str,
)
def test_attention_of_any_sizes(build: Build, other: dict[str, tuple[int, ...]]) -> None:
    sizes = ROWS | other

    def body(q: Any, k: Any, m: Any, v: Any) -> Any:
        weights = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=k), y=m), axis=-1)
        return mb.matmul(x=weights, y=v, transpose_y=True)

    path = build({name: (shape, "fp32") for name, shape in sizes.items()}, body)
    both(path, **{name: normal(*shape) for name, shape in sizes.items()})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cap", [None, 50.0, -5.0])
def test_bounded_scores(build: Build, transposed: bool, cap: float | None) -> None:
    """With the rounded 1 / cap that a program in fp16 holds, or a negative bound."""
    sizes = ROWS | {"q": (1, 2, 5, 8), "m": (1, 1, 5, 5)}

    def body(q: Any, k: Any, m: Any, v: Any) -> Any:
        scores = mb.matmul(x=q, y=k)
        if cap is not None:
            part = np.float32(np.float16(1 / cap))
            scores = mb.mul(x=mb.tanh(x=mb.mul(x=scores, y=part)), y=np.float32(cap))
        weights = mb.softmax(x=mb.add(x=scores, y=m), axis=-1)
        return mb.matmul(x=weights, y=v, transpose_x=transposed, transpose_y=True)

    path = build({name: (shape, "fp32") for name, shape in sizes.items()}, body)
    both(path, **{name: normal(*shape) for name, shape in sizes.items()})


def test_keys_and_values_in_other_parts(build: Build) -> None:
    sizes = {"q": (1, 2, 3, 8), "k0": (1, 2, 8, 8), "k1": (1, 2, 8, 4), "m": (1, 1, 3, 12),
             "v0": (1, 2, 4, 6), "v1": (1, 2, 4, 6)}  # fmt: skip

    def body(q: Any, k0: Any, k1: Any, m: Any, v0: Any, v1: Any) -> Any:
        scores = mb.matmul(x=q, y=mb.concat(values=[k0, k1], axis=3))
        weights = mb.softmax(x=mb.add(x=scores, y=m), axis=-1)
        return mb.matmul(x=weights, y=mb.concat(values=[v0, v1], axis=3), transpose_y=True)

    path = build({name: (shape, "fp32") for name, shape in sizes.items()}, body)
    both(path, **{name: normal(*shape) for name, shape in sizes.items()})


@pytest.mark.parametrize("count", [1, 2])
def test_sinks(build: Build, count: int) -> None:
    sizes = ROWS | {"s": (1, 2, 3, count)}

    def body(q: Any, k: Any, m: Any, v: Any, s: Any) -> Any:
        scores = mb.concat(values=[mb.add(x=mb.matmul(x=q, y=k), y=m), s], axis=3)
        weights = mb.softmax(x=scores, axis=-1)
        weights = mb.slice_by_index(x=weights, begin=[0] * 4, end=[1, 2, 3, 5])
        return mb.matmul(x=weights, y=v, transpose_y=True)

    path = build({name: (shape, "fp32") for name, shape in sizes.items()}, body)
    both(path, **{name: normal(*shape) for name, shape in sizes.items()})


def test_a_joined_weight(build: Build) -> None:
    """Along its inputs, which is no join of rows."""
    one, two = normal(8, 32, 1, 1), normal(8, 32, 1, 1)

    def body(x: Any) -> Any:
        return mb.conv(x=x, weight=mb.concat(values=[one, two], axis=1))

    both(build({"x": ((1, 64, 1, 3), "fp32")}, body), x=normal(1, 64, 1, 3))


MOVES: dict[str, Callable[..., Any]] = {
    "a squeezed axis whose begin does not count": lambda x: mb.slice_by_index(
        x=x, begin=[3, 0], end=[4, 5], begin_mask=[True, False], squeeze_mask=[True, False]
    ),
    "a size that is kept": lambda x: mb.reshape(x=x, shape=[1, 0, -1]),
    "an update of a cast": lambda x: mb.sub(
        x=mb.cast(
            x=mb.slice_update(
                x=mb.cast(x=mb.relu(x=x), dtype="fp16"), update=np.ones((1, 5), np.float16),
                begin=[0, 0], end=[1, 5],
            ),
            dtype="fp32",
        ),
        y=mb.relu(x=x),
    ),
    "whole quotients": lambda x: mb.floor_div(x=x, y=np.float32(0.1)),
    "a cast out of range": lambda x: mb.cast(
        x=mb.cast(x=mb.mul(x=x, y=np.float32(300)), dtype="int8"), dtype="fp32"
    ),
    "a begin at the end": lambda x: mb.slice_by_size(x=x, begin=[3, 4], size=[1, -1]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_moves(build: Build, name: str) -> None:
    body = MOVES[name]
    path = build({"x": ((4, 5), "fp32")}, body, target=ct.target.iOS18)
    both(path, x=np.arange(20, dtype=np.float32).reshape(4, 5) - 7)


@pytest.mark.parametrize("start", [2, 10**9])
def test_indices_beyond_the_end(start: int) -> None:
    """Of a hostile package: coremltools refuses to write it."""
    indices = np.arange(start, start + 4)
    path = program({"x": (4,)}, gather("x", indices))
    with pytest.raises(CetaneError):
        FastProgram(path, pack=True).function("main")({"x": np.ones(4, np.float32)})


def test_a_failure_names_the_op(build: Build) -> None:
    """And neither onnxruntime nor a place in its source."""
    inputs = {"x": ((4,), "fp32"), "i": ((2,), "int32")}
    bodies: dict[str, Callable[..., Any]] = {
        "gather taken: indices element out of data bounds, idx=9": lambda x, i: mb.gather(
            x=x, indices=i, axis=0, name="taken"
        ),
        "reshape turned: The input tensor cannot be reshaped": lambda x, i: mb.reduce_sum(
            x=mb.reshape(x=x, shape=i, name="turned")
        ),
    }
    for message, body in bodies.items():
        function = FastProgram(load(build(inputs, body))).function("main")
        with pytest.raises(CetaneError) as error:
            function({"x": np.ones(4, np.float32), "i": np.array([1, 9], np.int32)})
        assert error.value.message.startswith(f"function main, {message}")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_indices_beyond_a_palette(dtype: str) -> None:
    """Palettes of a tape's look-up have 16 or 64 entries, whatever the package's have."""
    held = np.full((16, 32, 1, 1), 3 if dtype == "uint8" else -1, np.dtype(dtype))
    indices = StoredConstant(TensorType(held.shape, dtype), lambda: held)
    table = np.ones((1, 1, 1, 1, 3, 1), np.float16)
    lut = StoredConstant(TensorType(table.shape, "fp16"), lambda: table)
    weight = op("constexpr_lut_to_dense", "w", "fp16", held.shape, indices=indices, lut=lut)
    path = program(
        {"x": (1, 32, 1, 2)},
        weight,
        op("conv", "y", "fp16", (1, 16, 1, 2), x="x", weight="w"),
        dtype="fp16",
    )
    x = {"x": np.ones((1, 32, 1, 2), np.float32)}
    for pack in (False, True):
        with pytest.raises(CetaneError, match=r"palette|out of bounds"):
            FastProgram(path, pack=pack).function("main")(x)
    with pytest.raises(CetaneError, match=r"palette|out of bounds"):
        Executable(path.functions["main"], "fp32")(x)


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0, -88.5, 90, 2.5, -1], np.float32)


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "silu", "tanh", "exp", "softplus", "clip"])
def test_nan_stays_nan(build: Build, kind: str) -> None:
    bounds = {"alpha": -1.0, "beta": 2.0} if kind == "clip" else {}
    path = build({"x": ((8,), "fp32")}, lambda x: getattr(mb, kind)(x=x, **bounds))
    both(path, x=SPECIAL)


@pytest.mark.parametrize("kind", ["maximum", "minimum"])
def test_nan_among_pairs(build: Build, kind: str) -> None:
    path = build({"x": ((8,), "fp32"), "y": ((8, 1), "fp32")}, getattr(mb, kind))
    both(path, x=SPECIAL, y=SPECIAL[:, None])


@pytest.mark.parametrize("kind", ["reduce_max", "reduce_min"])
@pytest.mark.parametrize("at", [0, 5, 99])
def test_nan_in_a_line(build: Build, kind: str, at: int) -> None:
    x = normal(3, 100)
    x[1, at] = np.nan
    path = build({"x": ((3, 100), "fp32")}, lambda x: getattr(mb, kind)(x=x, axes=[1]))
    both(path, x=x)


@pytest.mark.parametrize(("ops", "given"), [(1, 8_388_607), (2, 8_388_607), (1, 5)])
def test_integers_that_float32_does_not_hold(ops: int, given: int) -> None:
    made, last = [], "x"
    for number in range(ops):
        made.append(op("add", f"s{number}", "int32", (3,), x=last, y="x"))
        last = f"s{number}"
    made.append(op("add", "y", "int32", (3,), x=last, y=constant(np.int32(100_000_001))))
    x = np.array([given, -given, 1], np.int32)
    found = FastProgram(program({"x": (3,)}, *made, dtype="int32"), pack=True).function("main")
    assert found({"x": x})["y"].tolist() == ((ops + 1) * x + 100_000_001).tolist()


@pytest.mark.parametrize(("kind", "truth"), [("floor_div", np.floor_divide), ("mod", np.mod)])
def test_quotients_of_zeros_and_infinities(build: Build, kind: str, truth: Any) -> None:
    """And of numbers whose product, or rounded quotient, misleads."""
    numbers = [0, 1, -1, 2.5, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 9e6, -9000001, 0.7]
    x = np.array(numbers, np.float32)
    path = build({"x": ((12,), "fp32"), "y": ((12, 1), "fp32")}, getattr(mb, kind))
    (made,) = FastProgram(load(path)).function("main")({"x": x, "y": x[:, None]}).values()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(made, truth(x, x[:, None]))
    both(path, x=x, y=x[:, None])


@pytest.mark.parametrize("kind", ["floor_div", "mod"])
def test_the_lowest_integer_over_minus_one(kind: str) -> None:
    """It has no quotient. A processor's division of the two would end the process."""
    path = program(
        {"a": (4,), "b": (4,)}, op(kind, "y", "int32", (4,), x="a", y="b"), dtype="int32"
    )
    x = {"a": np.array([-(2**31), -7, 7, 7], np.int32), "b": np.array([-1, -1, -2, 2], np.int32)}
    wanted = {"floor_div": [7, -4, 3], "mod": [0, -1, 1]}
    assert Executable(path.functions["main"], "fp32")(x)["y"].tolist()[1:] == wanted[kind]
    assert FastProgram(path).function("main")(x)["y"].tolist()[1:] == wanted[kind]


def test_a_constant_that_float32_does_not_hold() -> None:
    """Beside it, the largest sum of two inputs is equal to it in float32."""
    double = op("add", "s", "int32", (3,), x="x", y="x")
    ops = double, op("equal", "y", "bool", (3,), x="s", y=constant(2**24 + 1))
    found = FastProgram(program({"x": (3,)}, *ops, dtype="int32"), pack=True).function("main")
    assert found({"x": np.array([2**23, 1, -1], np.int32)})["y"].tolist() == [False] * 3


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_integers_that_no_tape_holds(dtype: str) -> None:
    path = program({"x": (3,)}, op("identity", "y", dtype, (3,), x="x"), dtype=dtype)
    with pytest.raises(CetaneError, match=f"no arrays of {dtype}"):
        FastProgram(path, pack=True).function("main")


def test_an_update_along_many_axes() -> None:
    shape, part = (1,) * 6 + (4,), (1,) * 6 + (2,)
    begin, end = constant(np.zeros(7, np.int32)), constant(np.array([1] * 6 + [2], np.int32))
    update = op("slice_update", "y", "fp32", shape, x="x", update="u", begin=begin, end=end)
    found = FastProgram(program({"x": shape, "u": part}, update), pack=True).function("main")
    inputs = {"x": np.zeros(shape, np.float32), "u": np.ones(part, np.float32)}
    assert found(inputs)["y"].ravel().tolist() == [1, 1, 0, 0]


def test_a_state_that_is_read_after_it_was_written(build: Build) -> None:
    """What is written later into a copy of its value, does not reach the state."""

    def body(s: Any, u: Any) -> Any:
        first = mb.slice_update(x=mb.read_state(input=s), update=u, begin=[0, 0], end=[1, 4])
        written = mb.coreml_update_state(state=s, value=first)
        second = mb.slice_update(x=written, update=u, begin=[2, 0], end=[3, 4])
        return mb.reduce_sum(x=second, axes=[0, 1], keep_dims=False)

    path = build({"u": ((1, 4), "fp16")}, body, {"s": ((3, 4), "fp16")})
    program = FastProgram(load(path), pack=True)
    function = program.function("main")
    state = function.make_state()
    (total,) = function({"u": np.ones((1, 4), np.float32)}, state).values()
    assert float(total) == 8
    assert state.arrays["s"].sum(1).tolist() == [4, 0, 0]


def gather(x: str, indices: np.ndarray) -> Op:
    return op("gather", "y", "fp32", indices.shape, x=x, indices=constant(indices.astype(np.int32)),
              axis=constant(np.int32(0)))  # fmt: skip
