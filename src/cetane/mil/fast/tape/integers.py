"""Integers in a function: a tape computes in float32, which holds all integers up to `EXACT`."""

import numpy as np

from cetane.mil.constants import Constants
from cetane.mil.dtypes import NUMPY
from cetane.mil.fast.tape.code import EXACT, LARGEST
from cetane.mil.fast.tape.last_reads import ALIASES
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.program import Argument, Op, TensorType

ON_INTEGERS = ALIASES | {"concat", "gather", "add", "sub", "maximum", "minimum", "select"}
"""Ops that may give integers, as long as float32 holds their results."""
NUMBERS_OF = ("x", "y", "a", "b", "values")
"""The inputs of `ON_INTEGERS` whose numbers, or sums of them, are the result."""


class IntegerBounds:
    """The largest magnitudes of a function's integers."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._bounds: dict[str, int] = {}
        """By the names of values."""

    def of(self, argument: Argument) -> int:
        """The largest magnitude of an integer; what a call is given has at most `LARGEST`."""
        if argument in self._constants:
            numbers = self._constants.array(argument)
            return int(np.abs(numbers.astype(np.int64)).max(initial=0))
        return self._bounds.get(str(argument), LARGEST)

    def add(self, op: Op) -> None:
        """Note the bounds of an op's results. Raises Unsupported for an op that computes integers
        that float32 may not hold."""
        integers = [value.name for value in op.outputs if value.type and is_integer(value.type)]
        if not integers:
            return
        if op.kind not in ON_INTEGERS:
            raise Unsupported(f"a tape has no {op.kind} of integers")
        given = [self.of(a) for name in NUMBERS_OF for a in op.inputs.get(name, ())]
        bound = sum(given) if op.kind in ("add", "sub") else max(given, default=LARGEST)
        if bound > EXACT:
            raise Unsupported(f"integers of {op.kind} may be larger than {EXACT}")
        self._bounds |= dict.fromkeys(integers, bound)


def is_integer(type_: TensorType) -> bool:
    """Whether a tensor holds integers."""
    return np.dtype(NUMPY[type_.dtype]).kind in "iu"
