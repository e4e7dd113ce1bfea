"""Runners: one way to call both executors, the fast one if it has all ops, else the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram, unsupported
from cetane.mil.program import MilFunction, Precision, Program


@dataclass(frozen=True)
class RunState:
    """The state of either executor, read and written as arrays."""

    native: Any
    read: Callable[[str], Array]
    write: Callable[[str, Array], None]


class Runner:
    """A compiled function of either executor."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __call__(self, inputs: Mapping[str, Array], state: RunState | None) -> dict[str, Any]:
        results: dict[str, Any] = self._native(inputs, None if state is None else state.native)
        return results

    def make_state(self) -> RunState:
        """The function's states, all zeros."""
        state = self._native.make_state()
        return RunState(state, state.read_state, state.write_state)


def prepare(program: Program, function: MilFunction, precision: Precision, fast: bool) -> Runner:
    """Compile for the fast executor if `fast` and if it has every op, else for the reference.

    The fast executor computes in fp32 only, and gives no strings or dictionaries.
    """
    plain = not function.dictionaries and all(
        type_.dtype in NUMPY and type_.dtype != "string" for type_ in function.outputs.values()
    )
    if fast and precision == "fp32" and plain and not unsupported(function):
        try:
            return Runner(FastProgram(program).function(function.name))
        except CetaneError:  # the fast executor lacks this form of an op
            pass
    return Runner(Executable(function, precision))
