"""One small function per MIL op, by kind of op. Importing this package fills the table `OPS`."""

from cetane.mil.ops import (  # noqa: F401
    activation,
    constexpr,
    control_flow,
    elementwise,
    gather,
    linear,
    normalization,
    reduction,
    shape,
    slicing,
    state,
    tensor,
)
from cetane.mil.ops.registry import OPS

__all__ = ["OPS"]
