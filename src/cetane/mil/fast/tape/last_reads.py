"""The last op that reads each value of a function: then its memory may be overwritten."""

from collections.abc import Sequence

from cetane.mil.fast.context import VIEW
from cetane.mil.program import Argument, MilFunction, Op

ALIASES = frozenset(
    ("reshape", "transpose", "slice_by_index", "split", "expand_dims", "squeeze", "identity", VIEW,
     "read_state", "write_state", "cast")
)  # fmt: skip
"""Ops whose results may be parts of their operands."""


class LastReads:
    """The number of the last op that reads a value, or a part of it.

    The *root* of a value that may be a part of another one is that one. Results are read after all
    ops.
    """

    def __init__(self, function: MilFunction, ops: Sequence[Op]) -> None:
        self._count = len(ops)
        self._roots: dict[str, str] = {}
        self._last: dict[str, int] = {}
        """By root."""
        states: dict[str, str] = {}
        for time, op in enumerate(ops):
            for name in op.references():
                self._last[self._root(name)] = time
            if op.kind == "write_state":
                states[str(op.inputs["input"][0])] = self._root(str(op.inputs["data"][0]))
            elif op.kind == "read_state":
                state = str(op.inputs["input"][0])
                self._roots[op.outputs[0].name] = states.get(state, state)
            elif op.kind in ALIASES:
                root = self._root(str(op.inputs["x"][0]))
                self._roots |= {value.name: root for value in op.outputs}
        for name in (*function.body.outputs, *states.values()):
            self._last[self._root(name)] = self._count

    def of(self, x: Argument) -> int:
        """The number of the last op that reads a value; the number of ops for an unknown value."""
        return self._last.get(self._root(str(x)), self._count)

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)
