"""The values of a function that are the same in every call: literals, and what is made of them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np

from cetane.mil.blob import BlobFile
from cetane.mil.dtypes import Array
from cetane.mil.ops import OPS
from cetane.mil.ops.registry import NEVER_FOLDED
from cetane.mil.program import Block, Constant, Function, Op, TensorType
from cetane.mil.substitute import Substitute


class Constants:
    """Finds the constant values among `ops`, and computes them with the reference executor.

    Nothing is read until `array` or `plain` is called. An argument is what `Op.inputs` holds: the
    name of a value, or a literal.
    """

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self._producers: dict[str, Op] = {}
        for op in ops:
            foldable = op.kind == "const" or (op.kind in OPS and op.kind not in NEVER_FOLDED)
            if foldable and all(name in self._producers for name in op.references()):
                self._producers.update({value.name: op for value in op.outputs})

    def __contains__(self, argument: str | Constant) -> bool:
        return isinstance(argument, Constant) or argument in self._producers

    def producer(self, argument: str | Constant) -> Op | None:
        """The op that makes a constant value; None for a literal argument."""
        return self._producers.get(argument) if isinstance(argument, str) else None

    def type(self, argument: str | Constant) -> TensorType:
        """Shape and MIL dtype. Raises KeyError for a value that is not constant."""
        if isinstance(argument, Constant):
            return argument.type
        types = {value.name: value.type for value in self._producers[argument].outputs}
        type_ = types[argument]
        assert type_ is not None
        return type_

    def array(self, argument: str | Constant) -> Array:
        """The value; floats are float32."""
        constant = self._literal(argument)
        if constant is not None:
            array = constant.numpy()
            return array.astype(np.float32) if array.dtype.kind == "f" else array
        assert isinstance(argument, str)
        ops = tuple(self._closure(argument))
        block = Block((), ops, (argument,))
        return Function("constant", {}, {argument: self.type(argument)}, {}, block).compile()({})[
            argument
        ]

    def plain(self, argument: str | Constant) -> Any:
        """The value as Python numbers, lists of them, or a string."""
        return self.array(argument).tolist()

    def key(self, argument: str | Constant) -> Hashable:
        """Equal for two values only if they are equal, and made without reading a weight: a
        literal of the weight file is known by its place there."""
        constant = self._literal(argument)
        if constant is not None:
            read = constant.numpy
            if isinstance(read, partial):
                file = getattr(read.func, "__self__", None)
                if isinstance(file, BlobFile | Substitute):
                    return (file.path, *read.args)
            value = constant.numpy()
            return (str(constant.type), value.tobytes())
        assert isinstance(argument, str)
        op = self._producers[argument]
        position = [value.name for value in op.outputs].index(argument)
        inputs = sorted(op.inputs.items())
        return (op.kind, position, *((n, *(self.key(a) for a in given)) for n, given in inputs))

    def _literal(self, argument: str | Constant) -> Constant | None:
        if isinstance(argument, Constant):
            return argument
        op = self._producers[argument]
        (value,) = op.inputs["val"] if op.kind == "const" else (None,)
        return value if isinstance(value, Constant) else None

    def _closure(self, name: str) -> list[Op]:
        """The ops that make a value, in execution order."""
        ops: dict[int, Op] = {}

        def collect(name: str) -> None:
            op = self._producers[name]
            if id(op) not in ops:
                for reference in op.references():
                    collect(reference)
                ops[id(op)] = op

        collect(name)
        return list(ops.values())
