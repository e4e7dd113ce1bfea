"""The memory that a function's ops hold: results that are still read later, and constants.

Each value alone has a limit, but a few lines can ask for any number of them.
"""

from collections.abc import Iterator
from math import prod

from cetane.errors import CetaneError
from cetane.mil.constants import place
from cetane.mil.index import FunctionIndex, flatten, last_uses
from cetane.mil.program import Argument, Body, MilFunction, Op, StoredConstant, TensorType

MOST_HELD = 2**31
"""The most elements that ops hold at one time, beside as many as the function is given: 8 GiB in
fp32. Ports hold some millions."""


def check_held(function: MilFunction) -> None:
    """Raise CetaneError if the ops of a valid function hold too much. A flexible axis counts as its
    smallest size."""
    most = MOST_HELD + sum(map(elements, (*function.inputs.values(), *function.states.values())))
    everything = sum(map(taken, flatten(function.body)))  # of most functions, little enough
    if everything > most and Held(function).peak(function.body) > most:
        raise CetaneError(f"its ops hold more than {most:,} elements at one time")


class Held:
    """The elements that executors hold while they run a function, and before."""

    def __init__(self, function: MilFunction) -> None:
        self._index = FunctionIndex(function)
        self._folded = sum(map(self._added, self._index.ops)) + self._repeated()
        """They are computed once, and kept for all runs."""

    def peak(self, body: Body) -> int:
        """The most elements at one time, of the results of a body and of the bodies in it."""
        held: dict[str, int] = {}
        now = most = self._folded
        for op, frees in zip(body.ops, last_uses(body), strict=True):
            inside = max((self.peak(inner) - self._folded for inner in op.bodies), default=0)
            if op.kind != "read_state":  # which copies nothing
                own = {v.name: elements(v.type) for v in op.outputs if not self._fixed(v.name)}
                held |= own
                now += sum(own.values())
            most = max(most, now + inside)
            now -= sum(held.pop(name, 0) for name in frees)
        return most

    def _fixed(self, name: str) -> bool:
        return name in self._index.fixed

    def _added(self, op: Op) -> int:
        """The elements of constant results, without those of arguments that nobody else reads: they
        go when the results are made. So a weight that is moved has the size of its file;
        `shapes/constexpr.py` bounds what decodes it."""
        if op.kind.startswith("const") or not all(self._fixed(v.name) for v in op.outputs):
            return 0
        made = sum(elements(value.type) for value in op.outputs)
        return max(0, made - sum(map(self._size, self._own(op))))

    def _repeated(self) -> int:
        """The elements of weights that the function has read already: an executor reads each anew,
        and its file may be small."""
        read = [one for op in self._index.ops for one in literals(op)]
        sizes = [(at, elements(one.type)) for one in read if (at := place(one)) is not None]
        return sum(size for _, size in sizes) - sum(dict(sizes).values())

    def _own(self, op: Op) -> set[Argument]:
        """The arguments that only this op reads."""
        given = {argument for arguments in op.inputs.values() for argument in arguments}
        return {a for a in given if not isinstance(a, str) or len(self._index.readers[a]) == 1}

    def _size(self, argument: Argument) -> int:
        return elements(self._index.type(argument))


def taken(op: Op) -> int:
    """The elements of an op's literals and results."""
    types = [*(one.type for one in literals(op)), *(value.type for value in op.outputs)]
    return sum(map(elements, types))


def literals(op: Op) -> Iterator[StoredConstant]:
    for arguments in op.inputs.values():
        yield from (one for one in arguments if isinstance(one, StoredConstant))


def elements(type_: TensorType | None) -> int:
    """The elements of a value; 0 for a list or a dictionary."""
    if type_ is None:
        return 0
    return prod(size if isinstance(size, int) else size.lower for size in type_.shape)
