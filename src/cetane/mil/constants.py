"""The constant values of a function: literals, and results that depend only on literals."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.blob import BlobFile
from cetane.mil.decode import DECODERS, MOVES
from cetane.mil.dtypes import NUMPY, Array
from cetane.mil.guard import failures_at
from cetane.mil.index import FunctionIndex, ops_that_make
from cetane.mil.program import Argument, Body, MilFunction, Op, StoredConstant, TensorType
from cetane.mil.substitute import Substitute


class Constants:
    """Computes the constant values of an indexed function.

    Nothing is read until `array` or `plain` is called. numpy decodes weights and moves their
    elements. The results of other ops need the reference executor, and so torch.
    """

    def __init__(self, index: FunctionIndex) -> None:
        self._index = index

    def __contains__(self, argument: Argument) -> bool:
        return self._index.is_fixed(argument)

    def producer(self, argument: Argument) -> Op | None:
        """The op that makes a constant value; None for a literal argument."""
        return self._index.producer(argument) if argument in self else None

    def type(self, argument: Argument) -> TensorType:
        """Shape and MIL dtype of a constant. Raises CetaneError for any other argument."""
        type_ = self._index.type(argument) if argument in self else None
        if type_ is None:
            raise CetaneError(f"{argument} is no constant tensor")
        return type_

    def array(self, argument: Argument) -> Array:
        """The value as an array; floats are float32. Raises CetaneError if it cannot be decoded."""
        literal = self._literal(argument)
        if literal is not None:
            array = literal.numpy()
            return array.astype(np.float32) if array.dtype.kind == "f" else array
        op = self._index.producers[str(argument)]
        implementation = DECODERS.get(op.kind) or MOVES.get(op.kind)
        if implementation is None:
            return self._by_reference(str(argument))
        with failures_at(f"{op.kind} {op.name}"):
            arguments: dict[str, Any] = {}
            for parameter, passing, given in implementation.arguments(op):
                arrays = [self.array(item) for item in given]
                if passing == "tensors":
                    arguments[parameter] = arrays
                else:
                    arguments[parameter] = arrays[0] if passing == "tensor" else arrays[0].tolist()
            result = implementation.call(**arguments)
            results = result if isinstance(result, tuple) else (result,)
            position = [value.name for value in op.outputs].index(str(argument))
            declared = self.type(argument)
            if not declared.accepts(results[position].shape):
                raise ValueError(
                    f"gives the shape {results[position].shape}, the program declares {declared}"
                )
            return stored(results[position], declared) if op.kind in DECODERS else results[position]

    def plain(self, argument: Argument) -> Any:
        """The value as Python numbers, lists of them, or a string."""
        return self.array(argument).tolist()

    def key(self, argument: Argument) -> Hashable:
        """A key that is equal for two values only if the values are equal. Reads no weight.

        A literal in the weight file is known by its place there.
        """
        literal = self._literal(argument)
        if literal is not None:
            return place(literal) or (str(literal.type), literal.numpy().tobytes())
        op = self._index.producers[str(argument)]
        position = [value.name for value in op.outputs].index(str(argument))
        inputs = sorted(op.inputs.items())
        return (op.kind, position, *((n, *(self.key(a) for a in given)) for n, given in inputs))

    def _literal(self, argument: Argument) -> StoredConstant | None:
        if isinstance(argument, StoredConstant):
            return argument
        op = self._index.producers[argument]
        (value,) = op.inputs["val"] if op.kind == "const" else (None,)
        return value if isinstance(value, StoredConstant) else None

    def _by_reference(self, name: str) -> Array:
        from cetane.mil.executor import Executable  # needs torch

        ops = ops_that_make(self._index.function, (name,))
        body = Body((), tuple(ops), (name,))
        function = MilFunction("constant", {}, {name: self.type(name)}, {}, body)
        value: Array = Executable(function)({})[name]
        return value


def place(literal: StoredConstant) -> Hashable:
    """The place of a literal in a weight file; None for one in the program."""
    read = literal.numpy
    if isinstance(read, partial):
        file = getattr(read.func, "__self__", None)
        if isinstance(file, BlobFile | Substitute):
            return (file.path, *read.args)
    return None


def stored(array: Array, type_: TensorType) -> Array:
    """A decoded weight with the values of its declared type, as a device keeps it.

    fp16 values come in a float32 array: `array` itself, if it can be written. Only decoders round;
    ops that move elements do not, so the fp32 weights of a `Substitute` keep their values.
    """
    if type_.dtype != "fp16":
        return array.astype(np.float32 if type_.dtype == "fp32" else NUMPY[type_.dtype])
    with np.errstate(over="ignore"):
        halves = array.astype(np.float16)
    if array.dtype != np.float32 or not array.flags.writeable:
        return halves.astype(np.float32)
    array[...] = halves  # no copy: the array of a head has 200 MB
    return array
