"""Tiny programs that ask for much: refused before anything is allocated."""

from typing import Any

import numpy as np
import pytest
from tests.mil.programs import constant, op, program

from cetane.errors import CetaneError
from cetane.mil.executor import compile
from cetane.mil.program import Op, StoredConstant, TensorType

FAR = 10**5
ASKED: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "a crop that pads": (
        (1, 1, 4, 4), "crop", {"crop_height": [-FAR, 0], "crop_width": [-FAR, 0]},
    ),
    "a batch of padding": (
        (1, 1, 4, 4), "space_to_batch",
        {"block_shape": [2, 2], "paddings": [[0, FAR], [0, FAR]]},
    ),
    "a negative crop": (
        (4, 1, 4, 4), "batch_to_space", {"block_shape": [2, 2], "crops": [[-FAR, 0], [-FAR, 0]]},
    ),
    "the same row again and again": (
        (2**14, 2**10), "gather_nd", {"indices": np.zeros((2**19, 1), np.int32)},
    ),
}  # fmt: skip


def declared_as(x: tuple[int, ...], kind: str, **inputs: Any) -> Op:
    """An op whose result is declared to be as small as its input."""
    given = {name: constant(value) for name, value in inputs.items()}
    return op(kind, "y", "fp32", x, x="x", **given)


@pytest.mark.parametrize("name", ASKED)
def test_more_than_it_says(name: str) -> None:
    shape, kind, inputs = ASKED[name]
    with pytest.raises(CetaneError):
        program({"x": shape}, declared_as(shape, kind, **inputs))


@pytest.mark.parametrize("kind", ["add", "maximum"])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_arithmetic_that_is_declared_of_another_type(kind: str, dtype: str) -> None:
    array = np.ones(3, np.float32)
    one = StoredConstant(TensorType((3,), "fp32"), lambda: array)
    with pytest.raises(CetaneError, match="x is fp32, but y is declared"):
        program({"x": (3,)}, op(kind, "y", dtype, (3,), x="x", y=one))


def test_a_range_that_only_a_run_knows() -> None:
    ending = op("range_1d", "y", "int32", (4,), start=constant(0), end="end", step=constant(1))
    function = program({"end": ()}, ending, dtype="int32").functions["main"]
    with pytest.raises(CetaneError, match="elements"):
        compile(function, "fp32")({"end": np.array(2**31 - 1, np.int32)})
