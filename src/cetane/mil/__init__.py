"""Read a Core ML program and run it anywhere.

    program = load("model.mlpackage")
    run = program.functions["main"].compile(precision="fp16")
    outputs = run({"x": x}, run.make_state())

`program` holds what a package says (functions, ops, constants, interface), `executor` runs it with
one small function per MIL op (`ops`). It is the reference: exact and readable before fast.
"""

from typing import TYPE_CHECKING, Any

from cetane.mil.program import Block, Constant, Function, Op, Program, Range, TensorType, Value
from cetane.mil.reader import load

if TYPE_CHECKING:
    from cetane.mil.executor import Executable, State

__all__ = [
    "Block",
    "Constant",
    "Executable",
    "Function",
    "Op",
    "Program",
    "Range",
    "State",
    "TensorType",
    "Value",
    "load",
]


def __getattr__(name: str) -> Any:
    """The executor needs torch, which takes seconds to import; reading a program does not."""
    if name not in ("Executable", "State"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cetane.mil import executor

    return getattr(executor, name)
