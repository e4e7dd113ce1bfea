"""One small function per MIL op, by kind of op. Importing this package fills `LOWERINGS`."""

from cetane.mil.fast.ops import (
    activation,
    elementwise,
    gather,
    linear,
    normalization,
    reduction,
    shape,
    slicing,
    tensor,
)
from cetane.mil.fast.registry import LOWERINGS

__all__ = [
    "LOWERINGS",
    "activation",
    "elementwise",
    "gather",
    "linear",
    "normalization",
    "reduction",
    "shape",
    "slicing",
    "tensor",
]
