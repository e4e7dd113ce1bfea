"""One small function per MIL op, by kind of op. Importing this package fills the table `OPS`."""

from cetane.mil.ops import (  # noqa: F401
    activation,
    constexpr,
    control_flow,
    detection,
    elementwise,
    gather,
    linear,
    lists,
    normalization,
    recurrent,
    reduction,
    resampling,
    sampling,
    shape,
    slicing,
    spatial,
    state,
    tensor,
)
from cetane.mil.ops.registry import OPS

__all__ = ["OPS"]
