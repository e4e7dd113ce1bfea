"""Read a Core ML program and run it anywhere.

    program = load("model.mlpackage")
    run = Executable(program.functions["main"], precision="fp16")
    outputs = run({"x": x}, run.make_state())

`program` holds the content of a package: functions, ops, constants, interface. `executor` runs it
with one small function per MIL op (`ops`). It is the reference: exact and readable rather than
fast.
"""

from typing import TYPE_CHECKING, Any

from cetane.mil.program import (
    Body,
    MilFunction,
    NamedValue,
    Op,
    Program,
    SizeRange,
    TensorType,
)
from cetane.mil.reader import load

if TYPE_CHECKING:
    from cetane.mil.executor import Executable, TensorState

__all__ = [
    "Body",
    "Executable",
    "MilFunction",
    "NamedValue",
    "Op",
    "Program",
    "SizeRange",
    "TensorState",
    "TensorType",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the executor on demand: it needs torch, which takes seconds; reading does not."""
    if name not in ("Executable", "TensorState"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cetane.mil import executor

    return getattr(executor, name)
