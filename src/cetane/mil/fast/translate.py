"""The translation of a function into an ONNX graph."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.constants import Constants
from cetane.mil.dtypes import Array
from cetane.mil.fast.arrays import held
from cetane.mil.fast.attention_stage import View
from cetane.mil.fast.context import VIEW
from cetane.mil.fast.onnx_graph import OnnxGraph, OnnxWeight, Tensor, onnx_type
from cetane.mil.fast.ops import TRANSLATIONS
from cetane.mil.guard import failures_at
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Argument, MilFunction, NamedValue, Op
from cetane.mil.shapes import KnownOp, Shape, result_shapes

_LITERAL_ELEMENTS = 64
"""The most elements of a constant that lies in the graph itself."""
_OWN = ("read_state", "write_state", VIEW)
"""The translator itself translates these; `fusion` makes a view of a part of an input."""


def unsupported(function: MilFunction) -> list[str]:
    """The kinds of op in `function` that have no translation, sorted."""
    fixed = FunctionIndex(function).fixed
    return sorted(
        {
            op.kind
            for op in live_ops(function)
            if op.kind not in TRANSLATIONS
            and op.kind not in _OWN
            and not all(value.name in fixed for value in op.outputs)
        }
    )


def translate(function: MilFunction) -> OnnxGraph:
    """The graph of a function, op for op. States are inputs and outputs of their own names.

    Raises CetaneError that names the op which cannot be translated.
    """
    missing = unsupported(function)
    if missing:
        raise CetaneError(
            f"function {function.name} uses ops that the fast executor lacks: {', '.join(missing)}",
            hint="use the reference executor: mil.Executable",
        )
    with failures_at(f"function {function.name}"):
        return _Translator(function).graph


class _Translator:
    def __init__(self, function: MilFunction) -> None:
        self.graph = OnnxGraph()
        self._function = function
        self._index = FunctionIndex(function)
        self._constants = Constants(self._index)
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}
        for name, type_ in function.inputs.items():
            self._values[name] = Tensor(name, type_.shape, type_.dtype)
        for name, type_ in function.states.items():
            self._states[name] = Tensor(name, type_.shape, type_.dtype)
        for op in live_ops(function):
            if not all(value.name in self._constants for value in op.outputs) or not op.outputs:
                self.graph.op = f"{op.kind} {op.name}"
                with failures_at(f"function {function.name}, {self.graph.op}"):
                    self._translate(op)
        self.graph.op = ""
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
            # An output needs a node of its own: it may be an input or a constant.
            graph.outputs[name] = result if result in made else graph("Identity", result)
            made.discard(result)

    def _translate(self, op: Op) -> None:
        if op.kind == "read_state":
            (state,) = op.inputs["input"]
            self._values[op.outputs[0].name] = self._states[str(state)]
        elif op.kind == "write_state":
            (state,), (data,) = op.inputs["input"], op.inputs["data"]
            self._states[str(state)] = self._tensor(data)
        elif op.kind == VIEW:
            self._view(op)
        else:
            result_shapes(KnownOp(op, self._shape, self._plain))  # bounds them
            result = TRANSLATIONS[op.kind].call(self.graph, **self._arguments(op))
            names = (result,) if isinstance(result, str) else result
            for name, value in zip(names, op.outputs, strict=True):
                self._values[value.name] = _typed(name, value)

    def _view(self, op: Op) -> None:
        (source,), (value,) = op.inputs["x"], op.outputs
        begin, end = (self._constants.plain(op.inputs[name][0]) for name in ("begin", "end"))
        name = f"{source}[{begin}:{end}]"
        self.graph.views[name] = View(str(source), begin, end)
        self._values[name] = self._values[value.name] = _typed(name, value)

    def _arguments(self, op: Op) -> dict[str, Any]:
        arguments = {}
        for parameter, passing, given in TRANSLATIONS[op.kind].arguments(op):
            items = [self._argument(item, passing, parameter) for item in given]
            arguments[parameter] = items if passing == "tensors" else items[0]
        return arguments

    def _argument(self, item: Argument, passing: str, parameter: str) -> Any:
        if passing in ("tensor", "tensors"):
            return self._tensor(item)
        if item in self._constants:
            return self._constants.plain(item)
        if passing == "ints":
            return self._tensor(item)
        raise CetaneError(f"input {parameter!r} must be a constant")

    def _shape(self, item: Argument) -> Shape | None:
        type_ = self._index.type(item)
        return None if type_ is None or type_.enumerated else type_.static_shape

    def _plain(self, item: Argument) -> Any:
        """A parameter's value, if it is known. Ops may compute it from literals."""
        return self._constants.plain(item) if item in self._constants else None

    def _tensor(self, item: Argument) -> Tensor:
        if isinstance(item, str) and item in self._values:
            return self._values[item]
        type_ = self._constants.type(item)
        shape = type_.static_shape
        if shape is None:
            raise CetaneError(f"the constant {item} has no fixed shape")
        read = partial(self._read, item, type_.dtype)
        if math.prod(shape) <= _LITERAL_ELEMENTS:
            return Tensor(self.graph.literal(read()), shape, type_.dtype)
        weight = OnnxWeight(self._constants.key(item), shape, onnx_type(type_.dtype), read)
        tensor = Tensor(self.graph.weight(weight), shape, type_.dtype)
        if isinstance(item, str):
            self._values[item] = tensor
        return tensor

    def _read(self, item: Argument, dtype: str) -> Array:
        return held(self._constants.array(item), dtype)


def _typed(name: str, value: NamedValue) -> Tensor:
    """A node's result with the type that the program declares."""
    if value.type is None:
        raise CetaneError(f"its result {value.name} is not a tensor")
    return Tensor(name, value.type.shape, value.type.dtype)


def live_ops(function: MilFunction) -> list[Op]:
    """The ops that an output or a state depends on, without literals."""
    needed = set(function.body.outputs)
    live = []
    for op in reversed(function.ops):
        if op.kind == "write_state" or any(value.name in needed for value in op.outputs):
            needed.update(op.references())
            if op.kind != "const":
                live.append(op)
    return live[::-1]
