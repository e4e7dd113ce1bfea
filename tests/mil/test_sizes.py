"""Tiny programs that ask for much: refused before anything is allocated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cetane.errors import CetaneError
from cetane.mil import Program
from cetane.mil.executor import compile
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType
from cetane.mil.validate import check_program

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


def constant(value: Any) -> StoredConstant:
    array = np.asarray(value, np.int32)
    return StoredConstant(TensorType(array.shape, "int32"), lambda: array)


def program(x: tuple[int, ...], kind: str, dtype: str = "fp32", **inputs: Any) -> Program:
    """One op whose result is declared to be as small as its input."""
    given = {"x": ("x",)} | {name: (constant(value),) for name, value in inputs.items()}
    type_ = TensorType(x, dtype)
    op = Op(kind, "y", given, (NamedValue("y", type_),))
    function = MilFunction("main", {"x": TensorType(x, "fp32")}, {"y": type_}, {},
                           Body((), (op,), ("y",)))  # fmt: skip
    made = Program(Path("made"), {"main": function})
    check_program(made)
    return made


@pytest.mark.parametrize("name", ASKED)
def test_more_than_it_says(name: str) -> None:
    shape, kind, inputs = ASKED[name]
    with pytest.raises(CetaneError):
        program(shape, kind, **inputs)


@pytest.mark.parametrize("kind", ["add", "maximum"])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_arithmetic_that_is_declared_of_another_type(kind: str, dtype: str) -> None:
    array = np.ones(3, np.float32)
    one = StoredConstant(TensorType((3,), "fp32"), lambda: array)
    op = Op(kind, "y", {"x": ("x",), "y": (one,)}, (NamedValue("y", TensorType((3,), dtype)),))
    function = MilFunction("main", {"x": TensorType((3,), "fp32")},
                           {"y": TensorType((3,), dtype)}, {}, Body((), (op,), ("y",)))  # fmt: skip
    with pytest.raises(CetaneError, match="x is fp32, but y is declared"):
        check_program(Program(Path("made"), {"main": function}))


def test_a_range_that_only_a_run_knows() -> None:
    result = NamedValue("y", TensorType((4,), "int32"))
    given = {"start": (constant(0),), "end": ("end",), "step": (constant(1),)}
    body = Body((), (Op("range_1d", "y", given, (result,)),), ("y",))
    outputs = {"y": TensorType((4,), "int32")}
    function = MilFunction("main", {"end": TensorType((), "int32")}, outputs, {}, body)
    check_program(Program(Path("made"), {"main": function}))
    with pytest.raises(CetaneError, match="elements"):
        compile(function, "fp32")({"end": np.array(2**31 - 1, np.int32)})
