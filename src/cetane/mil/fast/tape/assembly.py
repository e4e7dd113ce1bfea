"""The assembly of a tape: instructions as rows of numbers, and blocks side by side in the arena."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cetane.mil.fast.tape.code import AXES, NUMBERS, WIDTH, Instruction, Opcode, Tape
from cetane.mil.fast.tape.place import Place

SHORT = 16
"""If the last axis has fewer elements, a longer axis is walked last in its place."""
ALIGNED = 16
"""Blocks of the arena start at a multiple of this many floats."""


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
