"""fp16 results are rounded once, as numpy's float16 rounds; fp32 precision rounds nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cetane.mil import Executable, load

SIZE = 16
# Every float16: overflow, subnormals, infinities and NaN must come out as numpy has them.
HALVES = arrays(np.uint16, SIZE, elements=st.integers(0, 2**16 - 1)).map(lambda a: a.view("f2"))
OPS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "real_div": np.divide,
}


@pytest.fixture(scope="module")
def arithmetic(build: Callable[..., Path]) -> Executable:
    """One program with the four operations on two fp16 vectors."""
    path = build(
        {"x": ((SIZE,), "fp16"), "y": ((SIZE,), "fp16")},
        lambda x, y: [getattr(mb, op)(x=x, y=y, name=op) for op in OPS],
    )
    return load(path).functions["main"].compile("fp16")


@given(x=HALVES, y=HALVES)
@settings(max_examples=200, deadline=None)
def test_arithmetic_rounds_like_float16(
    arithmetic: Executable, x: np.ndarray, y: np.ndarray
) -> None:
    outputs = arithmetic({"x": x, "y": y})
    with np.errstate(all="ignore"):
        for op, function in OPS.items():
            assert outputs[op].dtype == np.float16
            np.testing.assert_array_equal(outputs[op], function(x, y))


def chain(x: Any) -> Any:
    """1/3 in fp16, cast to fp32, tripled there."""
    third = mb.real_div(x=x, y=np.float16(3))
    return mb.mul(x=mb.cast(x=third, dtype="fp32"), y=np.float32(3))


@pytest.mark.parametrize(("precision", "third"), [("fp16", np.float16(1) / 3), ("fp32", 1 / 3)])
def test_only_fp16_values_are_rounded(
    build: Callable[..., Path], precision: Any, third: float
) -> None:
    run = load(build({"x": ((1,), "fp16")}, chain)).functions["main"].compile(precision)
    (output,) = run({"x": np.ones(1, np.float16)}).values()
    assert output.dtype == np.float32
    assert output == np.float32(3) * np.float32(third)


def test_a_sum_is_accumulated_in_float32(build: Callable[..., Path]) -> None:
    # In float16 the sum would stop at 2048, where adding 1 no longer changes it.
    run = load(
        build({"x": ((4096,), "fp16")}, lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=True))
    )
    (output,) = run.functions["main"].compile("fp16")({"x": np.ones(4096)}).values()
    assert output == 4096


def test_inputs_are_rounded_to_their_declared_type(build: Callable[..., Path]) -> None:
    function = load(build({"x": ((1,), "fp16")}, lambda x: mb.identity(x=x))).functions["main"]
    x = np.array([1.0001], np.float32)
    assert next(iter(function.compile("fp16")({"x": x}).values())) == 1
    assert next(iter(function.compile("fp32")({"x": x}).values())) == x
