"""One small function per MIL op, by kind of op. Importing this package fills `TRANSLATIONS`."""

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
from cetane.mil.fast.registry import TRANSLATIONS

__all__ = [
    "TRANSLATIONS",
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
