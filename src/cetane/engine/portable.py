"""Runs the finished `.mlpackage` files on any machine, through our own MIL executors."""

from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cetane.engine.backend import Arrays
from cetane.mil import Executable, Program, load
from cetane.mil.executor import compile
from cetane.mil.fast import FastProgram, unsupported
from cetane.mil.program import Precision


class ReferenceProgram:
    """Every op by the exact reference; functions compile on first use."""

    def __init__(self, program: Program, precision: Precision) -> None:
        self.program, self.precision = program, precision
        self.compiled: dict[str, Executable] = {}

    def function(self, name: str) -> Executable:
        if name not in self.compiled:
            self.compiled[name] = compile(self.program.functions[name], self.precision)
        return self.compiled[name]

    def make_state(self, function: str) -> Any:
        return self.function(function).make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.function(function)(inputs, state)


class FastGraph:
    """Whole functions as compiled graphs."""

    def __init__(self, program: Program, pack: bool) -> None:
        self.program = FastProgram(program, pack)

    def make_state(self, function: str) -> Any:
        return self.program.function(function).make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.program.function(function)(inputs, state)


class ShardPaths(Protocol):
    """Where the package of a shard is; a bundle knows."""

    def shard(self, name: str) -> Path: ...


Arithmetic = Precision | Literal["int8"]


class PortableBackend:
    """fp32 runs compiled graphs, and the reference where a program has an op they lack; fp16 runs
    the reference, which rounds every result as an fp16 machine would. int8 is fp32, but where few
    tokens meet linear weights of 8 or 4 bits: these stay packed, and activations are rounded to 8
    bits, one scale for 32 channels, as llama.cpp does."""

    name = "portable"

    def __init__(self, packages: ShardPaths, precision: Arithmetic = "fp32") -> None:
        self.packages, self.precision = packages, precision
        self.dtype: type[np.floating[Any]] = np.float16 if precision == "fp16" else np.float32

    def open(self, shard: str) -> ReferenceProgram | FastGraph:
        program = load(self.packages.shard(shard))
        if self.precision == "fp16":
            return ReferenceProgram(program, "fp16")
        if any(unsupported(f) for f in program.functions.values()):
            return ReferenceProgram(program, "fp32")
        return FastGraph(program, pack=self.precision == "int8")
