"""A backend for any machine: runs the finished `.mlpackage` files on cetane's own executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from cetane.engine.backend import Arrays
from cetane.engine.prepared import PreparedProgram
from cetane.mil import load
from cetane.mil.program import Precision, Program

if TYPE_CHECKING:  # torch and onnx take seconds to import, and a prepared program needs neither
    from cetane.mil.bind import Decoded
    from cetane.mil.executor import Executable
    from cetane.mil.fast.functions import FastFunction

F = TypeVar("F", "Executable", "FastFunction")


class PortableProgram(ABC, Generic[F]):
    """A program on one of cetane's executors. Each function is opened on its first use."""

    def __init__(self) -> None:
        self.opened: dict[str, F] = {}

    @abstractmethod
    def open(self, name: str) -> F:
        """A function of the program, ready to run."""

    def function(self, name: str) -> F:
        if name not in self.opened:
            self.opened[name] = self.open(name)
        return self.opened[name]

    def make_state(self, function: str) -> Any:
        return self.function(function).make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.function(function)(inputs, state)


class ReferenceProgram(PortableProgram["Executable"]):
    """A program on the exact reference executor."""

    def __init__(self, program: Program, precision: Precision) -> None:
        super().__init__()
        self.program, self.precision = program, precision
        self.decoded: Decoded = {}
        """The weights that its functions share."""

    def open(self, name: str) -> Executable:
        from cetane.mil.executor import Executable

        return Executable(self.program.functions[name], self.precision, self.decoded)


class FastFunctions(Protocol):
    """A source of compiled functions, by name."""

    def function(self, name: str) -> FastFunction: ...


class CompiledProgram(PortableProgram["FastFunction"]):
    """A program on the fast executor: whole functions as graphs or tapes."""

    def __init__(self, source: FastFunctions) -> None:
        super().__init__()
        self.source = source

    def open(self, name: str) -> FastFunction:
        return self.source.function(name)

    def narrower(self, function: str) -> dict[int, str]:
        return self.function(function).narrower


def in_fp32(
    program: Program, fast: FastFunctions | None = None
) -> ReferenceProgram | CompiledProgram:
    """A program as compiled graphs, or as the reference if it has an op that they lack. `fast` is
    a source of its graphs, if there is one."""
    from cetane.mil.fast.program import FastProgram
    from cetane.mil.fast.translate import unsupported

    if any(unsupported(function) for function in program.functions.values()):
        return ReferenceProgram(program, "fp32")
    return CompiledProgram(fast or FastProgram(program))


class ShardPaths(Protocol):
    """A source of the packages of shards, such as a bundle."""

    def shard(self, name: str) -> Path: ...


Arithmetic = Precision | Literal["stored"]


class PortableBackend:
    """A backend on any machine, in one of four arithmetics.

    - fp32 runs compiled graphs, or the reference for a program with an op that they lack.
    - fp16 runs the reference, which rounds every result as an fp16 machine would.
    - ane is fp16, with attention's products as an ANE was seen to compute them.
    - stored is fp32, but weights stay in the bits in which they are stored. Palettes of more than 6
      bits are rounded to 8 bits, with a scale for every 32 inputs. Where the processor multiplies
      words (16-bit integers), inputs of products are rounded to 15 bits. `cetane run` uses this
      arithmetic, so its functions are kept between runs.
    """

    name = "portable"

    def __init__(self, packages: ShardPaths, arithmetic: Arithmetic = "fp32") -> None:
        self.packages, self.arithmetic = packages, arithmetic
        self.by_rows = arithmetic == "stored"  # tapes leave out rows of padding
        self.dtype: type[np.floating[Any]] = np.float32
        if arithmetic == "fp16" or arithmetic == "ane":
            self.dtype = np.float16

    def open(self, shard: str) -> ReferenceProgram | CompiledProgram:
        """Open the package of a shard. Raises CetaneError for an invalid package."""
        if self.arithmetic != "stored":
            return self.open_in(shard, self.arithmetic)
        prepared = PreparedProgram(self.packages.shard(shard))
        return (
            CompiledProgram(prepared)
            if prepared.known
            else in_fp32(prepared.fast.program, prepared)
        )

    def open_in(self, shard: str, precision: Precision) -> ReferenceProgram | CompiledProgram:
        """Open what `load` gives for a shard, in an arithmetic other than `stored`."""
        program = self.load(shard)
        return in_fp32(program) if precision == "fp32" else ReferenceProgram(program, precision)

    def load(self, shard: str) -> Program:
        """The program of a shard, as the arithmetics other than `stored` run it."""
        return load(self.packages.shard(shard))
