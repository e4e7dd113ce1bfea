"""The table of translations: how each MIL op becomes ONNX nodes.

The first parameter of a translation, `g`, is the graph it adds to. The annotations of the others
say how they come: `Tensor` as a value of the graph, `list[Tensor]` for an input of several values,
`Packed` as a weight that stays packed, `Ints` as a list if the value is known and else as a
`Tensor`; anything else as plain Python values, which must be known. A translation returns the name
of its result, or a tuple of names.
"""

from typing import get_args

from cetane.mil.fast.onnx_graph import Tensor
from cetane.mil.fast.packed import Packed
from cetane.mil.implementation import Implementations

Ints = list[int] | Tensor
Tensors = list[Tensor]


def _form(annotation: object) -> str:
    if annotation == Ints:
        return "ints"
    if annotation == Tensors:
        return "tensors"
    if annotation == Packed:
        return "packed"
    return "tensor" if Tensor in (annotation, *get_args(annotation)) else "plain"


TRANSLATIONS = Implementations(_form, supplied=("g",))
translates = TRANSLATIONS.enters
