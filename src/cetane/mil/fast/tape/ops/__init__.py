"""Instructions for each MIL op, by kind of op. Importing this package fills `INSTRUCTIONS`."""

from cetane.mil.fast.tape.ops import (  # noqa: F401
    elementwise,
    gather,
    linear,
    reduction,
    shape,
    slicing,
)
from cetane.mil.fast.tape.ops.registry import INSTRUCTIONS

__all__ = ["INSTRUCTIONS"]
