"""The table of ops of the reference executor.

The annotation of a parameter decides what is passed: a tensor for `Tensor`, a list for `Tensors`
(an input of several values), the state itself for `StateCell`, MIL's list for `TensorList`. For any
other (`int`, `str`, `list[int]`, ...) it is plain Python values. `bodies` are the nested bodies of
the op, as functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from cetane.mil.implementation import Implementations

Tensors = list[Tensor]
Bodies = list[Callable[[list[Tensor]], list[Tensor]]]


class StateCell:
    """One named state during a run."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self._tensors = tensors
        self._name = name

    def read(self) -> Tensor:
        return self._tensors[self._name]

    def write(self, value: Tensor) -> None:
        # The entry is replaced, never written into, so tensors read before keep their values.
        self._tensors[self._name] = value


@dataclass(frozen=True)
class TensorList:
    """MIL's list. An element that was never written is None, and reads as `empty`."""

    elements: tuple[Tensor | None, ...]
    empty: Tensor | None

    def read(self, index: int) -> Tensor:
        value = self.elements[index]
        if value is None:
            value = self.empty
        if value is None:
            raise ValueError(f"element {index} of the list was never written")
        return value


def _passing(annotation: object) -> str:
    choices = {annotation, *get_args(annotation)}
    if Tensors in choices:
        return "tensors"
    return "tensor" if {Tensor, StateCell, TensorList} & choices else "plain"


OPS = Implementations(_passing, supplied=("bodies",))
op = OPS.enters
