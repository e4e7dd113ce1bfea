"""Read a Core ML program and run it anywhere.

    program = load("model.mlpackage")
    run = program.functions["main"].compile(precision="fp16")
    outputs = run({"x": x}, run.make_state())

`program` holds what a package says (functions, ops, constants, interface), `executor` runs it with
one small function per MIL op (`ops`). It is the reference: exact and readable before fast.
"""

from cetane.mil.executor import Executable, State
from cetane.mil.program import Block, Constant, Function, Op, Program, Range, TensorType, Value
from cetane.mil.reader import load

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
