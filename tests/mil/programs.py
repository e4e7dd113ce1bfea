"""Programs made op by op, as a hostile package may hold them: coremltools would not write these."""

from pathlib import Path
from typing import Any

import numpy as np

from cetane.mil import Program
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType
from cetane.mil.validate import check_program


def constant(array: Any) -> StoredConstant:
    held = np.asarray(array, np.int32)
    return StoredConstant(TensorType(held.shape, "int32"), lambda: held)


def op(kind: str, name: str, dtype: str, shape: tuple[int, ...], **inputs: Any) -> Op:
    given = {key: (value,) for key, value in inputs.items()}
    return Op(kind, name, given, (NamedValue(name, TensorType(shape, dtype)),))


def program(inputs: dict[str, tuple[int, ...]], *ops: Op, dtype: str = "fp32") -> Program:
    """A program of one function whose result is y."""
    given = {name: TensorType(shape, dtype) for name, shape in inputs.items()}
    y = ops[-1].outputs[0].type
    assert y is not None
    function = MilFunction("main", given, {"y": y}, {}, Body((), ops, ("y",)))
    made = Program(Path("made"), {"main": function})
    check_program(made)
    return made
