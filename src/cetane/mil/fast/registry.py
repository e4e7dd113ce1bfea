"""The table of lowerings: how each MIL op becomes ONNX nodes.

A lowering's first parameter is the graph it adds to; the others are named like the inputs of the
MIL op. Their annotations say in which form they are handed over: `Tensor` as a value of the graph,
`list[Tensor]` for a variadic input, `Packed` as a weight that stays packed, `Ints` as a list if the
value is known and else as a `Tensor`; anything else as plain Python values, which must be known. A
parameter with a default is optional. It returns the name of its result, or a tuple of names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from cetane.mil.fast.graph import Tensor
from cetane.mil.fast.packed import Packed

Ints = list[int] | Tensor
Tensors = list[Tensor]
Result = str | tuple[str, ...]
Form = Literal["tensor", "tensors", "ints", "packed", "plain"]


@dataclass(frozen=True)
class Lowering:
    """An implementation, the form each parameter takes, and the inputs it may ignore."""

    call: Callable[..., Result]
    parameters: dict[str, Form]
    required: frozenset[str]
    ignored: frozenset[str]


F = TypeVar("F", bound=Callable[..., Result])

LOWERINGS: dict[str, Lowering] = {}


def lowers(kind: str, ignores: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Enter a function into the table as the lowering of the MIL op `kind`."""

    def register(function: F) -> F:
        _, *parameters = inspect.signature(function).parameters.values()
        LOWERINGS[kind] = Lowering(
            function,
            {p.name: _form(p.annotation) for p in parameters},
            frozenset(p.name for p in parameters if p.default is inspect.Parameter.empty),
            frozenset(ignores),
        )
        return function

    return register


def _form(annotation: object) -> Form:
    if annotation == Ints:
        return "ints"
    if annotation == Tensors:
        return "tensors"
    if annotation == Packed:
        return "packed"
    if Tensor in (annotation, *get_args(annotation)):
        return "tensor"
    return "plain"
