"""The instructions of a tape, as data: rows of numbers that the compiled loop reads.

A tape computes on one array of float32 numbers, its *arena*. An operand is a place: a base (the
arena, the weights, an input, an output), an offset, a shape and strides. So most moves of elements
cost nothing: a transpose is another order of strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from cetane.mil.dtypes import Array

ARENA, WEIGHTS, RUNS_AT, FIRST = range(4)
"""Bases: the arena, the weights, the runs of keys (int64); then inputs, states and outputs."""
AXES = 4
"""Axes of an instruction, after those that lie together are joined."""
MOST_AXES = 6
"""The most axes of a tensor that an `UPDATE` writes into."""
LARGEST = 1 << 23
"""The largest magnitude of an integer in a call's inputs: a sum of two is at most `EXACT`."""
EXACT = 1 << 24
"""The integer up to which float32 holds every integer."""
SHORT = 16
"""If the last axis has fewer elements, a longer axis is walked last in its place."""
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
class Place:
    """Where a value lies. `block` names a piece of the arena, which gets its offset at the end;
    then `offset` counts from its start. Offsets and strides count floats, or bytes if `narrow`:
    elements are int8 then, which only `WIDEN` reads."""

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int | None = None
    narrow: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        return self.lies_as(self.at(0, self.shape, strides_of(self.shape)))

    @property
    def joined(self) -> Place:
        """The same elements in the same order, with as few axes as possible."""
        shape: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if shape and strides[-1] == size * stride:
                shape[-1], strides[-1] = shape[-1] * size, stride
            elif size != 1:
                shape.append(size)
                strides.append(stride)
        return self.at(0, shape, strides)

    def lies_as(self, other: Place) -> bool:
        """Whether its elements lie as those of another place of this shape, from the same offset
        on."""
        return self.offset == other.offset and all(
            size == 1 or own == usual
            for size, own, usual in zip(self.shape, self.strides, other.strides, strict=True)
        )

    def shares(self, other: Place) -> bool:
        """Whether both lie in the same array or block."""
        return (self.base, self.block) == (other.base, other.block)

    def at(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Place:
        """A part of this place, or its elements in another order."""
        return Place(
            self.base, self.offset + offset, tuple(shape), tuple(strides), self.block, self.narrow
        )

    def broadcast(self, shape: Sequence[int]) -> Place:
        """This place, repeated along axes of size 1, and along new axes in front."""
        missing = len(shape) - len(self.shape)
        strides = [0] * missing + [
            0 if size == 1 else stride
            for size, stride in zip(self.shape, self.strides, strict=True)
        ]
        return self.at(0, shape, strides)

    def moved(self, bases: Mapping[int, int]) -> Place:
        """This place, in the array of its block's base, if the block has one."""
        base = None if self.block is None else bases.get(self.block)
        return self if base is None else replace(self, base=base, block=None)

    def reshaped(self, shape: Sequence[int]) -> Place | None:
        """The same elements in another shape; None if that needs a copy."""
        probe = np.lib.stride_tricks.as_strided(
            np.empty(1, np.uint8), self.shape, self.strides, writeable=False
        )
        try:
            view = np.reshape(probe, shape, copy=False)
        except ValueError:
            return None
        return self.at(0, view.shape, view.strides)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


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


def joined_axes(places: Sequence[Place]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides of `AXES` axes over which places of one shape are walked together.

    The first place decides the order. Axes that lie together in all places become one. If the last
    is short, the longest moves to the end: a line costs more than its elements. Raises ValueError
    if more than `AXES` remain.
    """
    shape = places[0].shape
    order = sorted(
        (axis for axis, size in enumerate(shape) if size != 1),
        key=lambda axis: (-places[0].strides[axis], axis),
    )
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in places]
    for axis in order:
        own = [place.strides[axis] for place in places]
        if sizes and all(
            known[-1] == stride * shape[axis] for known, stride in zip(strides, own, strict=True)
        ):
            sizes[-1] *= shape[axis]
            for known, stride in zip(strides, own, strict=True):
                known[-1] = stride
            continue
        sizes.append(shape[axis])
        for known, stride in zip(strides, own, strict=True):
            known.append(stride)
    longest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
    if sizes and sizes[-1] < SHORT < sizes[longest]:
        for known in (sizes, *strides):
            known.append(known.pop(longest))
    missing = AXES - len(sizes)
    if missing < 0:
        raise ValueError(f"more than {AXES} axes do not lie together")
    return [1] * missing + sizes, [[0] * missing + known for known in strides]


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


def encoded(
    instruction: Instruction, offsets: dict[int, int], wait: bool
) -> tuple[list[int], list[float]]:
    """An instruction as numbers. With `wait`, all threads wait for each other after it. Raises
    ValueError if it needs more than `WIDTH` numbers or `AXES` axes."""
    places = [instruction.result, *instruction.operands]
    if instruction.opcode in (Opcode.UNARY, Opcode.BINARY, Opcode.SELECT):
        sizes, strides = joined_axes(places)
    else:
        sizes, strides = [1] * AXES, [[0] * AXES for _ in places]

    def address(place: Place) -> list[int]:
        start = 0 if place.block is None else offsets[place.block]
        return [place.base, start + place.offset]

    row = [int(instruction.opcode), int(wait), int(instruction.shared), instruction.kind]
    row += [n for place in places for n in address(place)] + [0] * (2 * (4 - len(places)))
    row += sizes
    row += [n for known in strides for n in known] + [0] * (AXES * (4 - len(places)))
    row += [n for place in instruction.unstrided for n in address(place)]
    row += instruction.parameters
    if len(row) > WIDTH:
        raise ValueError(f"an instruction of {len(row)} numbers")
    numbers = [*instruction.numbers, *[0.0] * (NUMBERS - len(instruction.numbers))]
    return row + [0] * (WIDTH - len(row)), numbers


def tape_of(instructions: Sequence[Instruction], sizes: dict[int, int], runs: int) -> Tape:
    """The tape of some instructions, whose blocks of the arena have these sizes."""
    offsets, arena = arranged(instructions, sizes)
    rows, numbers = [], []
    for index, instruction in enumerate(instructions):
        following = instructions[index + 1] if index + 1 < len(instructions) else None
        wait = instruction.shared or (following is not None and following.shared)
        row, own = encoded(instruction, offsets, wait)
        rows.append(row)
        numbers.append(own)
    work = sum(math.prod(i.parameters[:3]) for i in instructions if i.opcode is Opcode.PRODUCT)
    return Tape(
        np.array(rows, np.int64).reshape(-1, WIDTH),
        np.array(numbers, np.float32).reshape(-1, NUMBERS),
        arena,
        runs,
        work,
    )


ALIGNED = 16
"""Blocks of the arena start at a multiple of this many floats."""


def arranged(
    instructions: Sequence[Instruction], sizes: dict[int, int]
) -> tuple[dict[int, int], int]:
    """The offset of each block, and the size of the arena, in floats.

    Blocks that are never in use at the same time may overlap: each takes the first gap that is
    large enough.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, instruction in enumerate(instructions):
        for place in (instruction.result, *instruction.read):
            if place.block is not None:
                first.setdefault(place.block, time)
                last[place.block] = time
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, the last time
    total = 0
    for block in sorted(first, key=lambda block: first[block]):
        live = sorted(item for item in live if item[2] >= first[block])
        need = -(-sizes[block] // ALIGNED) * ALIGNED
        at = 0
        for offset, end, _ in live:
            if offset - at >= need:
                break
            at = max(at, end)
        offsets[block] = at
        live.append((at, at + need, last[block]))
        total = max(total, at + need)
    return offsets, total
