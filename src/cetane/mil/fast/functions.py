"""Functions that onnxruntime runs, their states, and the feeding of a shared session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array
from cetane.mil.fast.arrays import accepted, declared, held
from cetane.mil.guard import reason
from cetane.mil.program import Signature

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass
class ArrayState:
    """The states of a function between calls, by name: float32 or int32 arrays.

    A call replaces arrays, and never writes into them.
    """

    arrays: dict[str, Array]

    def copy(self) -> ArrayState:
        """A copy of the state at this moment, to return to later. Copies no data."""
        return ArrayState(dict(self.arrays))

    def read_state(self, name: str) -> Array:
        """A copy of a state."""
        return self.arrays[name].copy()

    def write_state(self, name: str, value: Array) -> None:
        """Replace the values of a state."""
        self.arrays[name] = value.astype(self.arrays[name].dtype)


@dataclass(frozen=True)
class View:
    """A graph input that is a part of a function's input: `begin:end` of its first axis."""

    source: str
    begin: int
    end: int


@dataclass(frozen=True)
class Feeding:
    """The way from a call of one function to a run of the session that it shares with others."""

    signature: Signature
    whole: tuple[str, ...]
    """Inputs that the session takes unchanged."""
    views: dict[str, View]
    constants: dict[str, Array]
    """Inputs of the session that are the same in every call of this function."""
    results: dict[str, str]
    """The session's results, by the names of the function's outputs and states."""


class FastFunction:
    """A function compiled for onnxruntime. See `FastProgram.function`."""

    def __init__(self, feeding: Feeding, session: ort.InferenceSession) -> None:
        self.function = feeding.signature
        self._feeding, self._session = feeding, session
        self._results = list(feeding.results.values())

    def make_state(self) -> ArrayState:
        """The function's states, all zeros."""
        types = self.function.states
        return ArrayState(
            {
                name: held(np.zeros(shape, NUMPY[types[name].dtype]), types[name].dtype)
                for name, shape in self.function.state_shapes().items()
            }
        )

    def __call__(
        self, inputs: Mapping[str, Array], state: ArrayState | None = None
    ) -> dict[str, Array]:
        """Run once: arrays by input name in, arrays by output name out; updates `state`.

        Inputs have the declared shapes, and any float or integer type. Contiguous float32 is not
        copied. Float outputs are float32. Raises CetaneError that names the input that does not
        fit.
        """
        feeds = self._inputs(inputs)
        held_states = {} if state is None else state.arrays
        self.function.check_states({name: a.shape for name, a in held_states.items()})
        feeds.update(held_states)
        try:
            results = self._session.run(self._results, feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise CetaneError(f"function {self.function.name}: {reason(error)}") from error
        values = dict(zip(self._feeding.results, results, strict=True))
        for name in held_states:
            held_states[name] = values[name]
        types = self.function.outputs
        return {name: declared(values[name], type_) for name, type_ in types.items()}

    def _inputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        expected = self.function.inputs
        self.function.check_inputs(inputs)
        arrays = {name: accepted(name, inputs[name], type_) for name, type_ in expected.items()}
        feeds = {name: arrays[name] for name in self._feeding.whole} | self._feeding.constants
        for name, view in self._feeding.views.items():
            feeds[name] = arrays[view.source][view.begin : view.end]
        return feeds
