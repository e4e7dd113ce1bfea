"""The table of shape rules, and what a rule reads of an op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cetane.mil.program import Argument, Op
from cetane.validation import MOST_ELEMENTS

Shape = tuple[int, ...]
Shapes = list[Shape] | None
"""A shape for each result; None if the rule only bounds the op's memory."""


class Unknown(Exception):
    """A shape or value that is missing, or known only at run time."""


class KnownOp:
    """The shapes and parameters of one op. `shape_of` and `value_of` give None for unknown ones;
    the methods raise Unknown for these."""

    def __init__(
        self,
        op: Op,
        shape_of: Callable[[Argument], Shape | None],
        value_of: Callable[[Argument], Any],
    ) -> None:
        self.op, self._shape_of, self._value_of = op, shape_of, value_of

    def shapes(self, name: str) -> list[Shape]:
        """The shapes of all arguments of an input."""
        shapes = [self._shape_of(argument) for argument in self.op.inputs.get(name, ())]
        if not shapes or any(shape is None for shape in shapes):
            raise Unknown
        return [shape for shape in shapes if shape is not None]

    def shape(self, name: str = "x") -> Shape:
        """The shape of an input."""
        return self.shapes(name)[0]

    def value(self, name: str, default: Any = None) -> Any:
        """A parameter as a plain value; `default` if it is missing."""
        if name not in self.op.inputs:
            return default
        value = self._value_of(self.op.inputs[name][0])
        if value is None:
            raise Unknown
        return value

    def values(self, name: str) -> list[int]:
        """A required parameter that is a list of integers."""
        value = self.value(name)
        if value is None:
            raise Unknown
        return [int(item) for item in (value if isinstance(value, list) else [value])]


ShapeRule = Callable[[KnownOp], Shapes]
RULES: dict[str, ShapeRule] = {}
READ_TENSORS = {"range_1d": ("start", "end", "step")}
"""Tensors of an op whose values, not only their shapes, say how large its results are."""


def rule(*kinds: str) -> Callable[[ShapeRule], ShapeRule]:
    """Enter a function as the rule of these kinds of op."""

    def enter(function: ShapeRule) -> ShapeRule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return enter


def result_shapes(given: KnownOp) -> Shapes:
    """The shapes of an op's results; None if they are unknown.

    Raises ValueError if the op's inputs do not fit each other, or if a result is too large.
    """
    known = RULES.get(given.op.kind)
    if known is None:
        return None
    try:
        shapes = known(given)
    except Unknown:
        return None
    if not given.op.kind.startswith("constexpr_"):  # see `constexpr`
        for shape in shapes or ():
            bounded(shape)
    return shapes


def bounded(shape: Sequence[int]) -> None:
    """Raise ValueError for a negative size, or for too many elements."""
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {tuple(shape)} has a negative size")
    # Empty tensors too: a library may multiply the other sizes.
    if math.prod(size or 1 for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"the shape {tuple(shape)} has more than {MOST_ELEMENTS} elements")


def axis_of(axis: Any, rank: int) -> int:
    """An axis of `rank` axes, counted from the start. Raises ValueError if there is none."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} among {rank}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """The shape to which these shapes broadcast."""
    rank = max(map(len, shapes))
    sizes = []
    for column in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        wide = {size for size in column if size != 1}
        if len(wide) > 1:
            raise ValueError(f"the shapes {' and '.join(map(str, shapes))} do not broadcast")
        sizes.append(wide.pop() if wide else 1)
    return tuple(sizes)
