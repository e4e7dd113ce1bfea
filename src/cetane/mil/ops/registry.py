"""The table of ops, and how an op's function says what it takes.

A function's parameters are named like the inputs of the MIL op. Their annotations say in which form
the executor hands them over: `Tensor` as a tensor, `Tensors` as a list (a variadic input),
`StateCell` as the state itself, `TensorList` as MIL's list, `Bodies` as the op's nested blocks;
anything else (`int`, `str`, `list[int]`, ...) as plain Python values. A parameter with a default is
optional.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import Tensor

Tensors = list[Tensor]
Bodies = list[Callable[[list[Tensor]], list[Tensor]]]
Form = Literal["tensor", "tensors", "plain", "bodies"]


class StateCell:
    """One named state during a run."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self._tensors = tensors
        self._name = name

    def read(self) -> Tensor:
        return self._tensors[self._name]

    def write(self, value: Tensor) -> None:
        # The entry is replaced, never written into: tensors read before keep their values.
        self._tensors[self._name] = value


@dataclass(frozen=True)
class TensorList:
    """MIL's list. An element that was never written is None and reads as `empty`."""

    elements: tuple[Tensor | None, ...]
    empty: Tensor | None

    def read(self, index: int) -> Tensor:
        value = self.elements[index]
        if value is None:
            value = self.empty
        if value is None:
            raise ValueError(f"element {index} of the list was never written")
        return value


Label = str | int
Result = Tensor | TensorList | tuple[Tensor, ...] | tuple[Label, dict[Label, float]] | None


@dataclass(frozen=True)
class OpFunction:
    """An implementation, the form each of its parameters takes, and the inputs it may ignore."""

    call: Callable[..., Result]
    parameters: dict[str, Form]
    required: frozenset[str]
    ignored: frozenset[str]


F = TypeVar("F", bound=Callable[..., Result])

OPS: dict[str, OpFunction] = {}

NEVER_FOLDED = {"read_state", "write_state", "cond", "while_loop"}
"""Ops that must happen at their place in every run, whatever their inputs are. `sampling` adds its
own."""


def op(kind: str, ignores: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Enter a function into the table as the MIL op `kind`.

    `ignores` names inputs that change nothing here (validation flags, dtypes that the result's
    declared type repeats).
    """

    def register(function: F) -> F:
        signature = inspect.signature(function).parameters
        forms = {name: _form(parameter.annotation) for name, parameter in signature.items()}
        required = {n for n, p in signature.items() if p.default is inspect.Parameter.empty}
        inputs = {name for name, form in forms.items() if form != "bodies"}
        OPS[kind] = OpFunction(function, forms, frozenset(required & inputs), frozenset(ignores))
        return function

    return register


def _form(annotation: object) -> Form:
    choices = {annotation, *get_args(annotation)}
    if Tensors in choices:
        return "tensors"
    if Bodies in choices:
        return "bodies"
    if {Tensor, StateCell, TensorList} & choices:
        return "tensor"
    return "plain"
