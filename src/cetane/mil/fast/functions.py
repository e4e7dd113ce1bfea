"""Run the functions of a package on onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnxruntime as ort

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array, kind
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.model import alike, differing_literals, model
from cetane.mil.fast.onnx_graph import OnnxGraph, held
from cetane.mil.fast.sessions import open_session
from cetane.mil.fast.translate import translate
from cetane.mil.program import MilFunction, Program, TensorType, listed


@dataclass
class ArrayState:
    """The states of a function between calls, by name: float32 (or int32) arrays.

    A call replaces arrays and never writes into them.
    """

    arrays: dict[str, Array]

    def copy(self) -> ArrayState:
        """The state as it is now, to return to later. Copies no data."""
        return ArrayState(dict(self.arrays))


class FastProgram:
    """The functions of a loaded package, compiled for onnxruntime when they are first asked for.

    Everything is computed in float32. With `pack`, products of few tokens multiply linear weights
    (int8, int4) as they are stored, and round their other factor to 8 bits, one scale for 32 of its
    elements. Functions that differ in sizes only share one session, and so their weights.
    """

    def __init__(self, program: Program, pack: bool = False) -> None:
        self.program, self._pack = program, pack
        self._functions: dict[str, FastFunction] = {}
        self._sessions: list[_Session] = []

    def function(self, name: str) -> FastFunction:
        """The function `name`. Raises CetaneError if there is none, or if it uses an op that
        has no ONNX form; the message lists the ops."""
        if name not in self.program.functions:
            raise CetaneError(
                f"{self.program.path} has no function {name!r}",
                hint=f"its functions are {listed(self.program.functions)}",
            )
        if name not in self._functions:
            session = self._session(name)
            self._functions[name] = FastFunction(self.program.functions[name], session)
        return self._functions[name]

    def _session(self, name: str) -> _Session:
        for session in self._sessions:
            if name in session.graphs:
                return session
        graph = self._lowered(self.program.functions[name])
        graphs = {name: graph}
        for other, function in self.program.functions.items():
            if other == name or any(other in session.graphs for session in self._sessions):
                continue
            try:
                candidate = self._lowered(function)
            except CetaneError:  # raised again when somebody asks for this function
                continue
            if alike(graph, candidate):
                graphs[other] = candidate
        self._sessions.append(_Session(graphs))
        return self._sessions[-1]

    def _lowered(self, function: MilFunction) -> OnnxGraph:
        return translate(fuse(function, self._pack))


class _Session:
    """An onnxruntime session for functions whose graphs are alike."""

    def __init__(self, graphs: dict[str, OnnxGraph]) -> None:
        self.graphs = graphs
        self.variable = differing_literals(list(graphs.values()))

    @cached_property
    def session(self) -> ort.InferenceSession:
        graph = next(iter(self.graphs.values()))
        weights = {name: weight.array() for name, weight in graph.weights.items()}
        return open_session(model(list(self.graphs.values())), weights)


class FastFunction:
    """A function compiled for onnxruntime. See `FastProgram.function`."""

    def __init__(self, function: MilFunction, shared: _Session) -> None:
        self.function = function
        graph = shared.graphs[function.name]
        self._session = shared.session
        self._constants = {name: graph.literals[name] for name in shared.variable}
        self._views = graph.views
        self._whole = [name for name in function.inputs if name in graph.inputs]
        self._results = list(graph.outputs.values())
        self._names = list(graph.outputs)

    def make_state(self) -> ArrayState:
        """The function's states, all zeros."""
        arrays = {}
        for name, type_ in self.function.states.items():
            if type_.static_shape is None:
                raise CetaneError(f"state {name} has no fixed shape: {type_}")
            zeros = np.zeros(type_.static_shape, NUMPY[type_.dtype])
            arrays[name] = held(zeros, type_.dtype)
        return ArrayState(arrays)

    def __call__(
        self, inputs: Mapping[str, Array], state: ArrayState | None = None
    ) -> dict[str, Array]:
        """Run once: arrays by input name in, arrays by output name out; `state` is updated.

        Inputs are arrays of the declared shapes and of any float or integer type; contiguous
        float32 is not copied. Float outputs are float32. Raises CetaneError that names the input
        that does not fit.
        """
        feeds = self._inputs(inputs)
        held_states = {} if state is None else state.arrays
        self.function.check_states({name: a.shape for name, a in held_states.items()})
        feeds.update(held_states)
        try:
            results = self._session.run(self._results, feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise CetaneError(f"function {self.function.name}: {error}") from error
        values = dict(zip(self._names, results, strict=True))
        for name in held_states:
            held_states[name] = values[name]
        return {
            name: _declared(values[name], type_) for name, type_ in self.function.outputs.items()
        }

    def _inputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        expected = self.function.inputs
        self.function.check_inputs(inputs)
        arrays = {name: _accepted(name, inputs[name], type_) for name, type_ in expected.items()}
        feeds = {name: arrays[name] for name in self._whole} | self._constants
        for name, view in self._views.items():
            feeds[name] = arrays[view.source][view.begin : view.end]
        return feeds


def _accepted(name: str, array: Array, type_: TensorType) -> Array:
    """An input in the form that the session takes."""
    array = np.asarray(array)
    if kind(array.dtype) != kind(np.dtype(NUMPY[type_.dtype])) or not type_.accepts(array.shape):
        raise CetaneError(f"input {name}: expected {type_}, got {array.dtype} {array.shape}")
    converted = held(array, type_.dtype)
    if converted.dtype.kind == "i" and not np.array_equal(converted, array):
        raise CetaneError(f"input {name}: has values that do not fit {type_.dtype}")
    return converted


def _declared(array: Array, type_: TensorType) -> Array:
    dtype = np.float32 if array.dtype.kind == "f" else NUMPY[type_.dtype]
    return array.astype(dtype, copy=False)
