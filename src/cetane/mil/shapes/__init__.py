"""Shape rules: the shapes of an op's results, from the shapes and parameters of its inputs.

The check of a program and the reference executor ask these rules before they allocate anything. No
result, and no tensor on the way to it, may have more than `MOST_ELEMENTS`. Importing this package
fills the table `RULES`.
"""

from cetane.mil.shapes import (  # noqa: F401
    constexpr,
    elementwise,
    gather,
    linear,
    recurrent,
    reduction,
    shape,
    slicing,
    spatial,
    tensor,
)
from cetane.mil.shapes.rules import (
    READ_TENSORS,
    RULES,
    KnownOp,
    Shape,
    bounded,
    broadcast,
    result_shapes,
)
from cetane.mil.shapes.shape import with_kept

__all__ = [
    "READ_TENSORS",
    "RULES",
    "KnownOp",
    "Shape",
    "bounded",
    "broadcast",
    "result_shapes",
    "with_kept",
]
