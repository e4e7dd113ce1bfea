"""The tapes of a program's functions, and their weights in one file."""

from __future__ import annotations

import tempfile
from typing import BinaryIO

from cetane.errors import CetaneError
from cetane.mil.fast.functions import FastFunction
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.narrower import narrower
from cetane.mil.fast.tape.code import Tape
from cetane.mil.fast.tape.function import function_of, mapped
from cetane.mil.fast.tape.store import ConstantStore
from cetane.mil.fast.tape.writer import write_tape
from cetane.mil.guard import failures_at
from cetane.mil.program import Program, Signature


class TapeModel:
    """The tapes of a program's functions, and of functions for fewer tokens, by name.

    A function with an op that tapes lack has none. Weights are read, and written into a temporary
    file, one by one.
    """

    def __init__(self, program: Program) -> None:
        self.weights: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as this)
        store = ConstantStore(self.weights)
        self.tapes: dict[str, Tape] = {}
        self.signatures: dict[str, Signature] = {}
        for name, function in (narrower(program) | program.functions).items():
            try:
                with failures_at(f"function {name}"):
                    self.tapes[name] = write_tape(fuse(function, pack=True), store)
            except CetaneError:  # onnxruntime runs this function
                continue
            self.signatures[name] = function.signature
        self.weights.flush()

    def function(self, name: str) -> FastFunction:
        """A function that maps the weights into memory."""
        weights = mapped(self.weights)
        return function_of(self.signatures[name], self.tapes[name], weights, self.tapes)
