"""What rewrites ask about the function they work on, and what they make new ops of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from cetane.mil.dtypes import Array
from cetane.mil.fast.constants import Constants
from cetane.mil.program import Constant, Function, Op, Range, TensorType, Value

Argument = str | Constant


class Context:
    """Producers, readers, shapes and constants of a function, each found when it is asked for."""

    def __init__(self, function: Function) -> None:
        self.inputs = function.inputs
        self._ops = function.ops

    @cached_property
    def constants(self) -> Constants:
        return Constants(self._ops)

    @cached_property
    def readers(self) -> dict[Argument, list[Op]]:
        """The ops that read a value, by its name."""
        readers: dict[Argument, list[Op]] = defaultdict(list)
        for op in self._ops:
            for name in set(op.references()):
                readers[name].append(op)
        return readers

    @cached_property
    def _producers(self) -> dict[str, Op]:
        return {value.name: op for op in self._ops for value in op.outputs}

    @cached_property
    def _types(self) -> dict[str, TensorType | None]:
        return {value.name: value.type for op in self._ops for value in op.outputs}

    def producer(self, argument: Argument, kind: str) -> Op | None:
        """The op that makes a value, if it is of this kind."""
        op = self._producers.get(argument) if isinstance(argument, str) else None
        return op if op is not None and op.kind == kind else None

    def plain(self, op: Op, parameter: str, default: Any = None) -> Any:
        """A parameter as Python values; `default` if it is absent or known only at run time."""
        (argument,) = op.inputs.get(parameter, (None,))
        if argument is None or argument not in self.constants:
            return default
        return self.constants.plain(argument)

    def type(self, argument: Argument) -> TensorType:
        if argument in self.constants:
            return self.constants.type(argument)
        assert isinstance(argument, str)
        type_ = self.inputs.get(argument) or self._types[argument]
        assert type_ is not None
        return type_

    def shape(self, argument: Argument) -> tuple[int | Range, ...]:
        return self.type(argument).shape

    def part(self, op: Op) -> tuple[int, int, int] | None:
        """Axis, begin and end of a slice_by_index that cuts one axis, if it does just that."""
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

    def is_negative(self, value: Argument, x: Argument) -> bool:
        """Whether `value` is -x."""
        product = self.producer(value, "mul")
        if product is None:
            return False
        given = [product.inputs[name][0] for name in ("x", "y")]
        numbers = [a for a in given if a in self.constants and self.shape(a) == ()]
        return x in given and [self.constants.plain(a) for a in numbers] == [-1]


def literal(value: int | Iterable[int]) -> Constant:
    return constant(np.array(value, np.int32), "int32")


def constant(array: Array, dtype: str) -> Constant:
    return Constant(TensorType(array.shape, dtype), lambda: array)


def made(kind: str, name: str, type_: TensorType, **inputs: Argument | tuple[Argument, ...]) -> Op:
    """An op with one result of the same name."""
    given = {n: a if isinstance(a, tuple) else (a,) for n, a in inputs.items()}
    return Op(kind, name, given, (Value(name, type_),))
