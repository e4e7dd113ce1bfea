"""Programs for onnxruntime: functions become graphs, and like graphs share a model."""

from __future__ import annotations

from functools import cached_property

import onnxruntime as ort

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.functions import FastFunction, Feeding
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.model import alike, differing_literals, model
from cetane.mil.fast.onnx_graph import OnnxGraph
from cetane.mil.fast.sessions import open_session
from cetane.mil.fast.translate import translate
from cetane.mil.guard import failures_at
from cetane.mil.program import MilFunction, Program, Signature, listed


class FastProgram:
    """The functions of a loaded package, compiled for onnxruntime when they are first asked for.

    Everything is computed in float32. With `pack`, products of few tokens read linear weights
    (int8, int4) as stored, and round activations to 8 bits, one scale for 32 elements. Functions
    that differ only in sizes share one session, and so their weights.
    """

    def __init__(self, program: Program, pack: bool = False) -> None:
        self.program, self._pack = program, pack
        self._shared: list[SharedModel] = []

    def function(self, name: str) -> FastFunction:
        """The function `name`. Raises CetaneError if there is none, or if it uses ops without an
        ONNX form; the message lists these ops."""
        shared = self.shared(name)
        return FastFunction(shared.feedings[name], shared.session)

    def shared(self, name: str) -> SharedModel:
        """The model that a function shares with all functions like it. Raises as `function`."""
        if name not in self.program.functions:
            raise CetaneError(
                f"{self.program.path} has no function {name!r}",
                hint=f"its functions are {listed(self.program.functions)}",
            )
        for shared in self._shared:
            if name in shared.feedings:
                return shared
        graph = self._graph(self.program.functions[name])
        graphs = {name: graph}
        for other, function in self.program.functions.items():
            if other == name or any(other in shared.feedings for shared in self._shared):
                continue
            try:
                candidate = self._graph(function)
            except CetaneError:  # raised again when this function is asked for
                continue
            if alike(graph, candidate):
                graphs[other] = candidate
        self._shared.append(SharedModel(self.program, graphs))
        return self._shared[-1]

    def _graph(self, function: MilFunction) -> OnnxGraph:
        with failures_at(f"function {function.name}"):
            return translate(fuse(function, self._pack))


class SharedModel:
    """One ONNX model for functions whose graphs are alike, with the feeding of each."""

    def __init__(self, program: Program, graphs: dict[str, OnnxGraph]) -> None:
        self._graphs = list(graphs.values())
        variable = differing_literals(self._graphs)
        self.feedings = {
            name: _feeding(program.functions[name], graph, variable)
            for name, graph in graphs.items()
        }
        self.proto = model(self._graphs)

    def weight(self, name: str) -> Array | None:
        """A weight that the model names but does not hold, decoded now. None for other names."""
        weight = self._graphs[0].weights.get(name)
        return None if weight is None else weight.array()

    @cached_property
    def session(self) -> ort.InferenceSession:
        """A session that holds the weights in memory."""
        weights = {name: weight.array() for name, weight in self._graphs[0].weights.items()}
        return open_session(self.proto.SerializeToString(), weights)


def _feeding(function: MilFunction, graph: OnnxGraph, variable: list[str]) -> Feeding:
    return Feeding(
        Signature(function.name, function.inputs, function.outputs, function.states),
        tuple(name for name in function.inputs if name in graph.inputs),
        graph.views,
        {name: graph.literals[name] for name in variable},
        graph.outputs,
    )
