"""Programs made op by op, as a hostile package may hold them: coremltools would not write these."""

from collections.abc import Iterator
from dataclasses import replace
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


def retyped(function: MilFunction) -> Iterator[tuple[str, MilFunction]]:
    """A function again and again: in each, one result of one op is declared of another type."""
    for at, op_ in enumerate(function.ops):
        for number, value in enumerate(op_.outputs if op_.kind != "const" else ()):
            if value.type is None:
                continue
            other = "fp16" if value.type.dtype == "fp32" else "fp32"
            outputs = list(op_.outputs)
            outputs[number] = NamedValue(value.name, replace(value.type, dtype=other))
            ops = list(function.ops)
            ops[at] = replace(op_, outputs=tuple(outputs))
            body = replace(function.body, ops=tuple(ops))
            yield f"{op_.kind} {value.name}", replace(function, body=body)
