"""The context of a rewrite: facts about its function, and constructors of new ops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.constants import Constants
from cetane.mil.dtypes import Array
from cetane.mil.index import FunctionIndex
from cetane.mil.program import (
    Argument,
    MilFunction,
    NamedValue,
    Op,
    SizeRange,
    StoredConstant,
    TensorType,
)

VIEW, RMS_NORM, ATTENTION = "fast:view", "fast:rms_norm", "fast:attention"
WIDENED = "fast:widened"
ROWS_LINEAR, PACKED_LINEAR = "fast:rows_linear", "fast:packed_linear"
"""The kinds of op that rewrites make. A program's own kinds have no colon."""


class Context:
    """Producers, readers, shapes and constants of a function."""

    def __init__(self, function: MilFunction) -> None:
        self.inputs = function.inputs
        self.index = FunctionIndex(function)
        self.constants = Constants(self.index)
        self.producer = self.index.producer

    def readers(self, argument: Argument) -> list[Op]:
        """The ops that take a value as an argument."""
        return self.index.readers.get(argument, []) if isinstance(argument, str) else []

    def plain(self, op: Op, parameter: str, default: Any = None) -> Any:
        """A parameter as plain Python values; `default` if it is absent or computed in each run."""
        argument = op.inputs.get(parameter, (None,))[0]
        if argument is None or argument not in self.constants:
            return default
        return self.constants.plain(argument)

    def type(self, argument: Argument) -> TensorType:
        """The type of an argument, which must be a tensor."""
        type_ = self.index.type(argument)
        if type_ is None:
            raise CetaneError(f"{argument} is not a tensor")
        return type_

    def shape(self, argument: Argument) -> tuple[int | SizeRange, ...]:
        return self.type(argument).shape

    def cut(self, op: Op) -> tuple[int, int, int] | None:
        """Axis, begin and end of a slice_by_index that cuts only one axis; None for others."""
        shape = self.shape(op.inputs["x"][0])
        begin, end = self.plain(op, "begin"), self.plain(op, "end")
        if begin is None or end is None or any(self.plain(op, "squeeze_mask", ())):
            return None
        if any(step != 1 for step in self.plain(op, "stride", ())):
            return None
        nothing = [False] * len(shape)
        begin_mask = self.plain(op, "begin_mask", nothing)
        end_mask = self.plain(op, "end_mask", nothing)
        cut = []
        for axis, size in enumerate(shape):
            first = 0 if begin_mask[axis] else begin[axis]
            whole = first == 0 and (end_mask[axis] or end[axis] == size)
            if not whole:
                if not isinstance(size, int):
                    return None
                positions = range(size)[first : None if end_mask[axis] else end[axis]]
                cut.append((axis, positions.start, positions.stop))
        return cut[0] if len(cut) == 1 else None

    def is_given(self, value: Argument) -> bool:
        """Whether a value lies in the caller's arrays: an input, or a view of one."""
        return value in self.inputs or self.producer(value, VIEW) is not None

    def is_negative(self, value: Argument, x: Argument) -> bool:
        """Whether `value` is -x."""
        product = self.producer(value, "mul")
        if product is None:
            return False
        given = [product.inputs[name][0] for name in ("x", "y")]
        numbers = [a for a in given if a in self.constants and self.shape(a) == ()]
        return x in given and [self.constants.plain(a) for a in numbers] == [-1]


def factored(context: Context, value: Argument) -> tuple[Argument, float]:
    """x and the factor of `mul(x, number)`; for anything else, the value and 1."""
    product = context.producer(value, "mul")
    if product is None:
        return value, 1.0
    for x, number in (("x", "y"), ("y", "x")):
        (factor,) = product.inputs[number]
        if factor in context.constants and context.shape(factor) == ():
            return product.inputs[x][0], float(context.constants.plain(factor))
    return value, 1.0


def is_power_of_two(factor: float) -> bool:
    """Whether a product with a positive factor is exact."""
    return math.frexp(factor)[0] == 0.5


def ints(value: int | Iterable[int]) -> StoredConstant:
    """An int32 constant."""
    return constant(np.array(value, np.int32), "int32")


def constant(array: Array, dtype: str) -> StoredConstant:
    """A constant of a MIL dtype that holds an array."""
    return StoredConstant(TensorType(array.shape, dtype), lambda: array)


def new_op(
    kind: str, name: str, type_: TensorType, **inputs: Argument | tuple[Argument, ...]
) -> Op:
    """An op with one result of the same name."""
    given = {n: a if isinstance(a, tuple) else (a,) for n, a in inputs.items()}
    return Op(kind, name, given, (NamedValue(name, type_),))
