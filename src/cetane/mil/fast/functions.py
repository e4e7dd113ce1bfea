"""Functions that onnxruntime runs, their states, and the feeding of a shared session."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cetane.errors import LONGEST, CetaneError
from cetane.mil.dtypes import NUMPY, Array
from cetane.mil.fast.arrays import accepted, declared, held
from cetane.mil.fast.attention_stage import AttentionStage, Operand, View, value_of
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
class Feeding:
    """How the values of a function's call feed a session, which other functions share."""

    whole: tuple[str, ...]
    """Inputs that the session takes unchanged."""
    views: dict[str, View]
    constants: dict[str, Array]
    """Inputs of the session that are the same in every call of this function."""
    results: dict[str, str]
    """The session's results, by the names of values and states."""


@dataclass(frozen=True)
class GraphStage:
    """A stage that onnxruntime runs."""

    feeding: Feeding
    session: ort.InferenceSession

    def run(self, values: dict[str, Array], states: dict[str, Array]) -> None:
        """Add the results to a call's values, and replace its states."""
        feeding = self.feeding
        feeds = {n: values[n] if n in values else states[n] for n in feeding.whole}
        feeds |= feeding.constants
        feeds |= {name: value_of(view, values) for name, view in feeding.views.items()}
        feeds = {n: a.astype(np.int32) if a.dtype == np.int8 else a for n, a in feeds.items()}
        results = self.session.run(list(feeding.results.values()), feeds)
        for name, array in zip(feeding.results, results, strict=True):
            (states if name in states else values)[name] = array


_FAILURE = re.compile(
    r"Name:'(?P<op>.*?)\|[^|]*' Status Message: "
    r"(?:\S+:\d+ .*?\) (?:.*? was false\. )?)?"  # a place in onnxruntime's source
    r"(?P<message>.+)"
)
"""What onnxruntime says of a node that fails. See `onnx_graph.Node.name`."""


def _place(error: Exception) -> str:
    """The op that failed, if onnxruntime names it, and why."""
    failure = _FAILURE.search(str(error))
    if failure is None:
        return f": {reason(error)}"
    op = f", {failure['op']}" if failure["op"] else ""
    return f"{op}: {failure['message'][:LONGEST]}"


class Stage(Protocol):
    """A part of a function other than an attention."""

    def run(self, values: dict[str, Array], states: dict[str, Array]) -> None: ...


NARROW = (2, 4, 8)
"""Numbers of tokens for which a program gets additional functions, if it has wider ones."""


def at_tokens(function: str, tokens: int) -> str:
    """The name of the function for `tokens` that is made from the program's `function`."""
    return f"{function}@{tokens}"


class FastFunction:
    """A compiled function. See `FastProgram.function`."""

    def __init__(
        self,
        signature: Signature,
        stages: Sequence[Stage | AttentionStage],
        beside: Collection[str] = (),
    ) -> None:
        """`beside` are the names of all functions in its model."""
        self.signature, self._stages = signature, tuple(stages)
        self.narrower = {
            n: name for n in NARROW if (name := at_tokens(signature.name, n)) in beside
        }
        """The names of this function for fewer tokens, by their number."""

    def make_state(self) -> ArrayState:
        """The function's states, all zeros."""
        types = self.signature.states
        return ArrayState(
            {
                name: held(np.zeros(shape, NUMPY[types[name].dtype]), types[name].dtype)
                for name, shape in self.signature.state_shapes().items()
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
        expected, types = self.signature.inputs, self.signature.outputs
        self.signature.check_inputs(inputs)
        values = {name: accepted(name, inputs[name], type_) for name, type_ in expected.items()}
        held_states = {} if state is None else state.arrays
        self.signature.check_states({name: a.shape for name, a in held_states.items()})
        states = dict(held_states)
        seen: dict[tuple[Operand, int], Array] = {}
        try:
            for stage in self._stages:
                if isinstance(stage, AttentionStage):
                    stage.run(values, seen)
                else:
                    stage.run(values, states)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise CetaneError(f"function {self.signature.name}{_place(error)}") from error
        held_states.update(states)
        return {name: declared(values[name], type_) for name, type_ in types.items()}
