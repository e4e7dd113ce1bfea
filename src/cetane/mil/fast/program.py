"""Programs for onnxruntime: functions become graphs, and like graphs share a model."""

from __future__ import annotations

from functools import cached_property

import onnxruntime as ort

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.attention_stage import AttentionStage
from cetane.mil.fast.functions import FastFunction, Feeding, GraphStage
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.model import alike, differing_literals, model
from cetane.mil.fast.onnx_graph import OnnxGraph
from cetane.mil.fast.sessions import open_session
from cetane.mil.fast.stages import stages
from cetane.mil.fast.tape.model import TapeModel
from cetane.mil.fast.translate import translate
from cetane.mil.guard import failures_at
from cetane.mil.program import MilFunction, Program, listed


class FastProgram:
    """The functions of a loaded package, compiled when they are first asked for.

    Everything is computed in float32. With `pack`, functions become tapes, which read weights as
    the package stores them, or in the nearest form (`tape.weights`). All other functions become
    graphs of onnxruntime. Graphs that differ only in sizes share one session, and so their weights.
    """

    def __init__(self, program: Program, pack: bool = False) -> None:
        self.program, self._pack = program, pack
        self._shared: list[SharedModel] = []

    @cached_property
    def _tapes(self) -> TapeModel:
        return TapeModel(self.program)

    def function(self, name: str) -> FastFunction:
        """The function `name`. Raises CetaneError if there is none, or if it uses ops without an
        ONNX form; the message lists these ops."""
        return self.shared(name).function(name)

    def shared(self, name: str) -> SharedModel | TapeModel:
        """The model that a function shares with others. Raises as `function`."""
        if self._pack and name in self._tapes.tapes:  # only tapes have functions for fewer tokens
            return self._tapes
        if name not in self.program.functions:
            raise CetaneError(
                f"{self.program.path} has no function {name!r}",
                hint=f"its functions are {listed(self.program.functions)}",
            )
        for shared in self._shared:
            if name in shared.signatures:
                return shared
        own = self._stages(self.program.functions[name])
        staged = {name: own}
        for other, function in self.program.functions.items():
            if other == name or any(other in shared.signatures for shared in self._shared):
                continue
            try:
                candidate = self._stages(function)
            except CetaneError:  # raised again when this function is asked for
                continue
            if _alike(own, candidate):
                staged[other] = candidate
        self._shared.append(SharedModel(self.program, staged))
        return self._shared[-1]

    def _stages(self, function: MilFunction) -> list[OnnxGraph | AttentionStage]:
        with failures_at(f"function {function.name}"):
            return [
                stage if isinstance(stage, AttentionStage) else translate(stage)
                for stage in stages(fuse(function))
            ]


class SharedModel:
    """ONNX models for functions whose stages are alike, with the feedings of each function."""

    def __init__(
        self, program: Program, staged: dict[str, list[OnnxGraph | AttentionStage]]
    ) -> None:
        self.signatures = {name: program.functions[name].signature for name in staged}
        self.stages: list[SharedStage | SharedAttention] = []
        for together in zip(*staged.values(), strict=True):
            own = dict(zip(staged, together, strict=True))
            graphs = {n: stage for n, stage in own.items() if isinstance(stage, OnnxGraph)}
            attentions = {n: s for n, s in own.items() if isinstance(s, AttentionStage)}
            self.stages.append(SharedStage(graphs) if graphs else attentions)

    def function(self, name: str) -> FastFunction:
        """A function whose weights are in memory."""
        return FastFunction(
            self.signatures[name],
            [
                GraphStage(s.feedings[name], s.session) if isinstance(s, SharedStage) else s[name]
                for s in self.stages
            ],
        )


SharedAttention = dict[str, AttentionStage]
"""The attention of each function at one stage."""


class SharedStage:
    """One ONNX model for one stage of several functions."""

    def __init__(self, graphs: dict[str, OnnxGraph]) -> None:
        self._graphs = list(graphs.values())
        variable = differing_literals(self._graphs)
        self.feedings = {name: _feeding(graph, variable) for name, graph in graphs.items()}
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


def _feeding(graph: OnnxGraph, variable: list[str]) -> Feeding:
    return Feeding(
        tuple(name for name in graph.inputs if name not in graph.views),
        graph.views,
        {name: graph.literals[name] for name in variable},
        graph.outputs,
    )


def _alike(one: list[OnnxGraph | AttentionStage], other: list[OnnxGraph | AttentionStage]) -> bool:
    """Whether two functions can share sessions: their stages differ only in sizes."""
    return len(one) == len(other) and all(
        alike(a, b) if isinstance(a, OnnxGraph) and isinstance(b, OnnxGraph) else a == b
        for a, b in zip(one, other, strict=True)
    )
