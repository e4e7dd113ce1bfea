"""Runs the finished `.mlpackage` files on any machine, through our own MIL executors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from cetane.engine.backend import Arrays
from cetane.engine.prepared import PreparedProgram
from cetane.mil.program import Precision, Program
from cetane.mil.reader import load

if TYPE_CHECKING:  # torch and onnx take seconds to import, and a prepared program needs neither
    from cetane.mil.executor import Executable
    from cetane.mil.fast.functions import FastFunction


class ReferenceProgram:
    """Every op by the exact reference; functions compile on first use."""

    def __init__(self, program: Program, precision: Precision) -> None:
        self.program, self.precision = program, precision
        self.compiled: dict[str, Executable] = {}

    def function(self, name: str) -> Executable:
        if name not in self.compiled:
            from cetane.mil.executor import compile

            self.compiled[name] = compile(self.program.functions[name], self.precision)
        return self.compiled[name]

    def make_state(self, function: str) -> Any:
        return self.function(function).make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.function(function)(inputs, state)


class FastFunctions(Protocol):
    """Gives compiled functions by name."""

    def function(self, name: str) -> FastFunction: ...


class FastGraph:
    """Whole functions as compiled graphs."""

    def __init__(self, program: FastFunctions) -> None:
        self.program = program
        self.compiled: dict[str, FastFunction] = {}

    def function(self, name: str) -> FastFunction:
        if name not in self.compiled:
            self.compiled[name] = self.program.function(name)
        return self.compiled[name]

    def make_state(self, function: str) -> Any:
        return self.function(function).make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.function(function)(inputs, state)


class ShardPaths(Protocol):
    """Where the package of a shard is; a bundle knows."""

    def shard(self, name: str) -> Path: ...


Arithmetic = Precision | Literal["int8"]


class PortableBackend:
    """fp32 runs compiled graphs, and the reference where a program has an op they lack. fp16 runs
    the reference, which rounds every result as an fp16 machine would.

    int8 is fp32, except that linear weights of 8 or 4 bits stay packed in products of few tokens.
    There, activations are rounded to 8 bits, one scale for 32 channels, as llama.cpp does. It is
    the arithmetic of `cetane run`, so its graphs are kept between runs."""

    name = "portable"

    def __init__(self, packages: ShardPaths, precision: Arithmetic = "fp32") -> None:
        self.packages, self.precision = packages, precision
        self.dtype: type[np.floating[Any]] = np.float16 if precision == "fp16" else np.float32

    def open(self, shard: str) -> ReferenceProgram | FastGraph:
        """Open the package of a shard. CetaneError if it is not what it should be."""
        path = self.packages.shard(shard)
        if self.precision == "fp16":
            return ReferenceProgram(load(path), "fp16")
        if self.precision == "int8":
            prepared = PreparedProgram(path, pack=True)
            if prepared.known:
                return FastGraph(prepared)
            program = prepared.fast.program
        else:
            program = load(path)
        from cetane.mil.fast.program import FastProgram
        from cetane.mil.fast.translate import unsupported

        if any(unsupported(function) for function in program.functions.values()):
            return ReferenceProgram(program, "fp32")
        return FastGraph(prepared if self.precision == "int8" else FastProgram(program))
