"""A table of implementations of MIL ops, and the binding of an op's inputs to their arguments.

An implementation is a function with the op's inputs as parameters. The annotation of a parameter
decides how its argument is passed. A parameter with a default is optional.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from cetane.errors import CetaneError
from cetane.mil.program import Argument, Op

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Implementation:
    """A function for one kind of op, and how each of its parameters is passed.

    `ignored` are inputs of the op that change nothing here.
    """

    call: Callable[..., Any]
    passing: dict[str, str]
    required: frozenset[str]
    ignored: frozenset[str]

    def arguments(self, op: Op) -> Iterator[tuple[str, str, tuple[Argument, ...]]]:
        """Parameter, passing and arguments of every input that is not ignored.

        Raises CetaneError for an input that the function does not take, and for a missing one.
        """
        for parameter, given in op.inputs.items():
            if parameter in self.ignored:
                continue
            if parameter not in self.passing:
                raise CetaneError(f"input {parameter!r} is not supported")
            passing = self.passing[parameter]
            if passing != "tensors" and len(given) != 1:
                raise CetaneError(f"input {parameter!r} has {len(given)} values, not one")
            yield parameter, passing, given
        absent = self.required - op.inputs.keys()
        if absent:
            raise CetaneError(f"input {', '.join(sorted(absent))} is missing")


class Implementations(dict[str, Implementation]):
    """Implementations by kind of op.

    `passing_of` reads an annotation: it gives `tensor`, `tensors`, `plain` for Python values, or a
    word of the table's own. `supplied` are parameters that the caller supplies, not the op.
    """

    def __init__(self, passing_of: Callable[[object], str], supplied: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._passing_of, self._supplied = passing_of, supplied

    def enters(self, kind: str, ignores: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Enter a function as the implementation of the MIL op `kind`.

        `ignores` names inputs that change nothing here: validation flags, and dtypes that the
        declared result repeats.
        """

        def enter(function: F) -> F:
            signature = inspect.signature(function).parameters
            taken = {n: p for n, p in signature.items() if n not in self._supplied}
            self[kind] = Implementation(
                function,
                {name: self._passing_of(p.annotation) for name, p in taken.items()},
                frozenset(n for n, p in taken.items() if p.default is inspect.Parameter.empty),
                frozenset(ignores),
            )
            return function

        return enter
