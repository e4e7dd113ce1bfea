"""Substitutes: a program with other values for its constants, so the same graph on other
weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from cetane.mil.dtypes import Array
from cetane.mil.program import MilFunction, Op, Program, StoredConstant


@dataclass(frozen=True)
class Substitute:
    """A value in place of a constant."""

    path: str
    """Its name: two substitutes of one name are equal."""
    values: Callable[[], Array]
    """A function that makes the value, float32."""

    def read(self) -> Array:
        """The value, made anew on each call."""
        return self.values()


Substitutes = Mapping[str, Substitute]
"""Substitutes by the names of the results that they replace."""


def substitute(program: Program, choose: Callable[[MilFunction], Substitutes]) -> Program:
    """The program with the substitutes that `choose` gives for each function.

    A substitute replaces a constant or the op that decodes one. Its value is read only when a
    function is compiled.
    """
    functions = {
        name: _substituted(function, choose(function))
        for name, function in program.functions.items()
    }
    return replace(program, functions=functions)


def _substituted(function: MilFunction, substitutes: Substitutes) -> MilFunction:
    ops = tuple(_op(op, substitutes) for op in function.ops)
    return replace(function, body=replace(function.body, ops=ops))


def _op(op: Op, substitutes: Substitutes) -> Op:
    if len(op.outputs) != 1 or op.outputs[0].name not in substitutes:
        return op
    (value,) = op.outputs
    assert value.type is not None
    constant = StoredConstant(value.type, partial(substitutes[value.name].read))
    return replace(op, kind="const", inputs={"val": (constant,)})
