"""Translate a function into an ONNX graph."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.constants import Constants
from cetane.mil.fast.graph import Graph, Tensor, View, Weight, held, onnx_type
from cetane.mil.fast.ops import LOWERINGS
from cetane.mil.fast.packed import Packed
from cetane.mil.fast.registry import Form, Lowering
from cetane.mil.program import Constant, Function, Op

# Constants of more elements stay out of the graph.
_LITERAL_ELEMENTS = 64
# Lowered by the lowerer itself; `view` is what `fusion` makes of a part of an input.
_OWN = ("read_state", "write_state", "view")


def unsupported(function: Function) -> list[str]:
    """The kinds of op in `function` that have no lowering, sorted."""
    constants = Constants(function.ops)
    return sorted(
        {
            op.kind
            for op in _live(function)
            if op.kind not in LOWERINGS
            and op.kind not in _OWN
            and not all(value.name in constants for value in op.outputs)
        }
    )


def lower(function: Function) -> Graph:
    """The graph of a function, op for op. States are inputs and outputs of their own names.

    Raises CetaneError that names the op which cannot be lowered.
    """
    missing = unsupported(function)
    if missing:
        raise CetaneError(
            f"function {function.name} uses ops that the fast executor lacks: {', '.join(missing)}",
            hint="Function.compile() runs it",
        )
    return _Lowerer(function).graph


class _Lowerer:
    def __init__(self, function: Function) -> None:
        self.graph = Graph()
        self._function = function
        self._constants = Constants(function.ops)
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}
        for name, type_ in function.inputs.items():
            self._values[name] = Tensor(name, type_.shape, type_.dtype)
        for name, type_ in function.states.items():
            self._states[name] = Tensor(name, type_.shape, type_.dtype)
        for op in _live(function):
            if not all(value.name in self._constants for value in op.outputs) or not op.outputs:
                self._lower(op)
        self._set_interface()

    def _set_interface(self) -> None:
        graph, function = self.graph, self._function
        read = {name for node in graph.nodes for name in node.inputs}
        results = {name: self._tensor(name).name for name in function.outputs}
        results |= {name: tensor.name for name, tensor in self._states.items()}
        read |= {*results.values(), *function.states}
        declared = {n: self._values[n] for n in (*function.inputs, *graph.views)}
        declared |= {n: Tensor(n, t.shape, t.dtype) for n, t in function.states.items()}
        graph.inputs.update({n: t for n, t in declared.items() if n in read})
        made = {result for node in graph.nodes for result in node.outputs}
        for name, result in results.items():
            # An output needs a result of its own; this one may be an input or a constant too.
            graph.outputs[name] = result if result in made else graph("Identity", result)
            made.discard(result)

    def _lower(self, op: Op) -> None:
        if op.kind == "read_state":
            (state,) = op.inputs["input"]
            self._values[op.outputs[0].name] = self._states[str(state)]
            return
        if op.kind == "write_state":
            (state,), (data,) = op.inputs["input"], op.inputs["data"]
            self._states[str(state)] = self._tensor(data)
            return
        where = f"function {self._function.name}, {op.kind} {op.name}"
        if op.kind == "view":
            self._view(op)
            return
        try:
            result = LOWERINGS[op.kind].call(self.graph, **self._arguments(op, LOWERINGS[op.kind]))
        except (CetaneError, ValueError, TypeError) as error:
            raise CetaneError(f"{where}: {error}") from error
        names = (result,) if isinstance(result, str) else result
        for name, value in zip(names, op.outputs, strict=True):
            if value.type is None:
                raise CetaneError(f"{where}: its result {value.name} is not a tensor")
            self._values[value.name] = Tensor(name, value.type.shape, value.type.dtype)

    def _view(self, op: Op) -> None:
        (source,) = op.inputs["x"]
        begin, end = (self._constants.plain(op.inputs[name][0]) for name in ("begin", "end"))
        (value,) = op.outputs
        assert value.type is not None
        name = f"{source}[{begin}:{end}]"
        self.graph.views[name] = View(str(source), begin, end)
        self._values[name] = Tensor(name, value.type.shape, value.type.dtype)
        self._values[value.name] = self._values[name]

    def _arguments(self, op: Op, lowering: Lowering) -> dict[str, Any]:
        arguments = {}
        for parameter, given in op.inputs.items():
            if parameter in lowering.ignored:
                continue
            if parameter not in lowering.parameters:
                raise CetaneError(f"input {parameter!r} is not supported")
            form = lowering.parameters[parameter]
            items = [self._argument(item, form, parameter) for item in given]
            arguments[parameter] = items if form == "tensors" else items[0]
        absent = lowering.required - arguments.keys()
        if absent:
            raise CetaneError(f"input {', '.join(sorted(absent))} is missing")
        return arguments

    def _argument(self, item: str | Constant, form: Form, parameter: str) -> Any:
        if form in ("tensor", "tensors"):
            return self._tensor(item)
        if form == "packed":
            return Packed(self._constants, item)
        if item in self._constants:
            return self._constants.plain(item)
        if form == "ints":
            return self._tensor(item)
        raise CetaneError(f"input {parameter!r} must be a constant")

    def _tensor(self, item: str | Constant) -> Tensor:
        if isinstance(item, str) and item in self._values:
            return self._values[item]
        type_ = self._constants.type(item)
        shape = type_.static_shape
        assert shape is not None
        read = partial(self._read, item, type_.dtype)
        if math.prod(shape) <= _LITERAL_ELEMENTS:
            return Tensor(self.graph.literal(read()), shape, type_.dtype)
        weight = Weight(self._constants.key(item), shape, onnx_type(type_.dtype), read)
        tensor = Tensor(self.graph.weight(weight), shape, type_.dtype)
        if isinstance(item, str):
            self._values[item] = tensor
        return tensor

    def _read(self, item: str | Constant, dtype: str) -> Array:
        return held(self._constants.array(item), dtype)


def _live(function: Function) -> list[Op]:
    """The ops that something depends on, without literals."""
    needed = set(function.block.outputs)
    live = []
    for op in reversed(function.ops):
        if op.kind == "write_state" or any(value.name in needed for value in op.outputs):
            needed.update(op.references())
            if op.kind != "const":
                live.append(op)
    return live[::-1]
