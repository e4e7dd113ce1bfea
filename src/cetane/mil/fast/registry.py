"""The table of translations: functions that turn each MIL op into ONNX nodes.

The first parameter of a translation, `g`, is the graph that it adds to. The annotation of every
other parameter decides what is passed:

- `Tensor`: a value of the graph; `list[Tensor]`: an input of several values.
- `Ints`: a list if the value is known, else a `Tensor`.
- anything else: plain Python values, which must be known.

A translation returns the name of its result, or a tuple of names.
"""

from typing import get_args

from cetane.mil.fast.onnx_graph import Tensor
from cetane.mil.implementation import Implementations

Ints = list[int] | Tensor
Tensors = list[Tensor]


def _passing(annotation: object) -> str:
    if annotation == Ints:
        return "ints"
    if annotation == Tensors:
        return "tensors"
    return "tensor" if Tensor in (annotation, *get_args(annotation)) else "plain"


TRANSLATIONS = Implementations(_passing, supplied=("g",))
translates = TRANSLATIONS.enters
