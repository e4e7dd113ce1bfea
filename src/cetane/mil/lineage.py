"""The lineage of a function's values: the ops and weights that they come from."""

from __future__ import annotations

from collections.abc import Iterator

from cetane.mil.constants import Constants
from cetane.mil.dtypes import FLOATS, Array
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Argument, Body, MilFunction, Op

SUFFIXES = ("_to_fp16", "_cast_fp16", "_to_fp32", "_cast_fp32", "_promoted", "_palettized",
            "_quantized", "_sparsified")  # fmt: skip
"""The endings that coremltools adds to a name when it changes the storage of a value."""


class Lineage:
    """The ops and weights from which the values of a function come. Constants and casts between
    float types are no such ops."""

    def __init__(self, function: MilFunction) -> None:
        self.index = FunctionIndex(function)
        self._constants = Constants(self.index)
        self.scopes: dict[str, str] = {}
        """The place in the torch model where each value is made, as far as a package tells.

        coremltools drops its scopes on saving, but names weights by their modules. So the scope of
        a value is the weight of its op. Without a weight, it is `after` the last weight that its
        inputs depend on."""
        self.before: dict[str, str] = {}
        """The input of each cast between float types, by the name of its result."""
        self._order: dict[str, int] = {}
        """The position of each `after` scope in the order of execution."""
        for op in self.index.ops:
            self._trace(op)

    def _trace(self, op: Op) -> None:
        names = [value.name for value in op.outputs]
        if op.kind == "const" or (names and names[0] in self.index.fixed):
            return
        if self.casts(op):
            self.before[names[0]] = next(self.inputs(op))[1]
        if scope := self._scope(op):
            self.scopes.update(dict.fromkeys(names, scope))

    def _scope(self, op: Op) -> str:
        if weight := self.weight(op).removesuffix("_weight"):
            self._order[f"after {weight}"] = len(self._order)
            return weight
        before = {f"after {scope.removeprefix('after ')}" for _, name in self.inputs(op)
                  if (scope := self.scopes.get(name))}  # fmt: skip
        return max(before, key=lambda scope: self._order.get(scope, 0), default="")

    def live(self, body: Body) -> list[Op]:
        """The ops of a body that run."""
        return [
            op
            for op in body.ops
            if op.kind != "const" and not (op.outputs and op.outputs[0].name in self.index.fixed)
        ]

    def inputs(self, op: Op) -> Iterator[tuple[str, str]]:
        """Parameter and name of every argument of an op that is not a constant."""
        for parameter, items in sorted(op.inputs.items()):
            for position, item in enumerate(items):
                if isinstance(item, str) and item not in self.index.fixed:
                    yield parameter if len(items) == 1 else f"{parameter}[{position}]", item

    def weight(self, op: Op) -> str:
        """The name of the first weight that an op takes; "" if it takes none."""
        for parameter in ("weight", "gamma", "x", "y"):
            for item in op.inputs.get(parameter, ()):
                if isinstance(item, str) and item in self.index.fixed and self._is_weight(item):
                    return plain(item)
        return ""

    def _is_weight(self, name: str) -> bool:
        type_ = self.index.types[name]
        return type_ is not None and type_.dtype in FLOATS and bool(type_.shape)

    def casts(self, op: Op) -> bool:
        """Whether an op only changes the float type of a value."""
        if op.kind not in ("cast", "identity") or len(op.outputs) != 1 or not any(self.inputs(op)):
            return False
        types = self.index.types[op.outputs[0].name], self.index.types[next(self.inputs(op))[1]]
        return op.kind == "identity" or all(t is not None and t.dtype in FLOATS for t in types)

    def source(self, name: str) -> str:
        """The value of another float type from which `name` was cast; else `name` itself."""
        while name in self.before:
            name = self.before[name]
        return name

    def constant(self, argument: Argument) -> Array | None:
        """The decoded value of an op's argument; None if it is not a constant tensor."""
        known = argument in self._constants and self.index.type(argument) is not None
        return self._constants.array(argument) if known else None


def plain(name: str) -> str:
    """A name without the endings that the converter added."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return plain(name.removesuffix(suffix))
    return name
