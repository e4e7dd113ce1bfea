"""The instructions of a tape, as data: rows of numbers that the compiled loop reads.

A tape computes on one array of float32 numbers, its *arena*. Its operands are places (`place.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from cetane.mil.dtypes import Array
from cetane.mil.fast.tape.place import Place

AXES = 4
"""Axes of an instruction, after those that lie together are joined."""
MOST_AXES = 6
"""The most axes of a tensor that an `UPDATE` writes into."""
LARGEST = 1 << 23
"""The largest magnitude of an integer in a call's inputs: a sum of two is at most `EXACT`."""
EXACT = 1 << 24
"""The integer up to which float32 holds every integer."""
WIDTH = 56
"""Numbers of an encoded instruction."""
NUMBERS = 2
"""Floats of an encoded instruction, such as an epsilon."""


class Opcode(IntEnum):
    """What an instruction does; see `loop.perform`."""

    UNARY = 0
    BINARY = 1
    SELECT = 2
    PRODUCT = 3
    NORM = 4
    REDUCE = 5
    SOFTMAX = 6
    RUNS = 7
    ATTEND = 8
    MATMUL = 9
    CONV = 10
    PICK = 11
    UPDATE = 12
    WIDEN = 13


class Unary(IntEnum):
    """Functions of one element; see `elements.transform`."""

    COPY = 0
    SILU = 1
    SIGMOID = 2
    TANH = 3
    GELU_TANH = 4
    GELU = 5
    GELU_SIGMOID = 6
    EXP = 7
    RELU = 8
    SOFTPLUS = 9
    SQRT = 10
    RSQRT = 11
    SQUARE = 12
    ABS = 13
    LOG = 14
    CLIP = 15
    INVERSE = 16
    FILL = 17
    ROUND = 18


class Binary(IntEnum):
    """Functions of two elements; see `elements.combine`."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    MAXIMUM = 4
    MINIMUM = 5
    EQUAL = 6
    NOT_EQUAL = 7
    GREATER = 8
    GREATER_EQUAL = 9
    LESS = 10
    LESS_EQUAL = 11


class Reduction(IntEnum):
    """Functions of a line."""

    SUM = 0
    MEAN = 1
    MAX = 2
    MIN = 3


@dataclass(frozen=True)
class Instruction:
    """An instruction: a result, up to three operands, and the parameters of its opcode.

    Threads divide the work of a `shared` instruction. One thread does any other.
    """

    opcode: Opcode
    result: Place
    operands: tuple[Place, ...] = ()
    kind: int = 0
    parameters: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    shared: bool = False
    unstrided: tuple[Place, ...] = ()
    """Operands without strides: the parts of keys and values."""

    @property
    def read(self) -> tuple[Place, ...]:
        return (*self.operands, *self.unstrided)

    def moved(self, bases: Mapping[int, int]) -> Instruction:
        """This instruction, with some blocks as whole arrays of these bases."""
        result, *read = (place.moved(bases) for place in (self.result, *self.read))
        count = len(self.operands)
        return replace(
            self, result=result, operands=tuple(read[:count]), unstrided=tuple(read[count:])
        )


@dataclass(frozen=True)
class Tape:
    """A function as instructions: `code (n, WIDTH)` int64, `numbers (n, NUMBERS)` float32.

    `arena` and `runs` are the sizes of the arena (floats) and of the runs of keys (int64).
    """

    code: Array
    numbers: Array
    arena: int
    runs: int
    work: int = field(default=0)
    """Multiplications of its products, which decide whether threads share it."""
    transposed: tuple[int, ...] = ()
    """The outputs whose last axis comes first in memory."""

    def __post_init__(self) -> None:
        """Make both arrays read-only, as a file's are: numba compiles anew for another kind."""
        for array in (self.code, self.numbers):
            array.flags.writeable = False
