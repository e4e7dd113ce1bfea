"""Elements at positions that a call computes, and caches of 8 bits: a part of the tape's loop."""

import numpy as np
from numba import carray, njit

from cetane.mil.fast.exact_attention import HIDDEN
from cetane.mil.fast.intrinsics import pointer
from cetane.mil.fast.tape.code import MOST_AXES
from cetane.mil.fast.tape.elements import put
from cetane.mil.fast.tape.encoded import (
    PARAMETERS,
    PLACES,
    address,
    gather,
    line_at,
    share_of,
)
from cetane.mil.fast.tape.place import RUNS_AT

_F = np.float32


@njit(nogil=True, cache=True, error_model="numpy")
def find_runs(row, bases):  # type: ignore[no-untyped-def]
    """Fill the runs of keys that some row of a mask shows: first their number, then four numbers
    for each, as `attend_exactly` reads them. After the places: rows of the mask, past and new keys,
    and the offset of the runs."""
    p = row[PARAMETERS:]
    rows, past, new, offset = p[0], p[1], p[2], p[3]
    mask = line_at(address(row, bases, 1), rows * (past + new)).reshape(rows, past + new)
    runs = carray(pointer(bases[row[PLACES]] + 8 * offset), 1 + 4 * (past + new + 1), np.int64)
    count, open_ = 0, False
    for key in range(past + new):
        shown = False
        for r in range(rows):
            shown = shown or mask[r, key] > HIDDEN
        if open_ and (not shown or key == past):
            runs[4 * count + 3] = key - (past if key > past else 0)
            count, open_ = count + 1, False
        if shown and not open_:
            part = 1 if key >= past else 0
            runs[4 * count + 1], runs[4 * count + 2] = part, key - part * past
            runs[4 * count + 4], open_ = key, True
    if open_:
        runs[4 * count + 3] = new if runs[4 * count + 1] else past
        count += 1
    runs[0] = count


@njit(nogil=True, cache=True)
def _scaled(y, x, scales):  # type: ignore[no-untyped-def]
    for j in range(len(y)):
        y[j] = _F(x[j]) * scales[j]


@njit(nogil=True, cache=True, error_model="numpy")
def widen(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """Numbers of 8 bits times the scale of their slot. After the places: heads, width, slots, and
    the offset of the runs of slots that are read; -1 for all slots."""
    p = row[PARAMETERS:]
    heads, width, slots, runs_at = p[0], p[1], p[2], p[3]
    start = bases[RUNS_AT] + 8 * max(runs_at, 0)
    count = 0 if runs_at < 0 else carray(pointer(start), 1, np.int64)[0]
    runs = carray(pointer(start + 8), 4 * count, np.int64).reshape(count, 4)
    scales = line_at(address(row, bases, 2), heads * slots).reshape(heads, slots)
    codes = bases[row[PLACES + 2]] + row[PLACES + 3]
    first, last = share_of(heads * width, thread, threads, 1)
    for line in range(first, last):
        y = line_at(address(row, bases, 0) + 4 * line * slots, slots)
        x, own = carray(pointer(codes + line * slots), slots, np.int8), scales[line // width]
        if runs_at < 0:
            _scaled(y, x, own)
        for run in runs:
            if run[0] == 0:
                shown = slice(run[1], run[2])
                _scaled(y[shown], x[shown], own[shown])


@njit(nogil=True, cache=True, error_model="numpy")
def pick(row, bases):  # type: ignore[no-untyped-def]
    """Elements in the order of indices. After the places: outer, indices, inner; the strides of
    inner, outer and indices in the operand; the axis' size (`tape.ops.gather` writes them). The
    result is contiguous."""
    p = row[PARAMETERS:]
    outer, count, inner = p[0], p[1], p[2]
    order = line_at(address(row, bases, 2), count)
    y = line_at(address(row, bases, 0), outer * count * inner)
    for o in range(outer):
        for n in range(count):
            index = np.int64(order[n])
            index += p[6] if index < 0 else 0
            if not 0 <= index < p[6]:
                return False
            x_at = address(row, bases, 1) + 4 * (o * p[4] + index * p[5])
            gather(y[(o * count + n) * inner : (o * count + n + 1) * inner], x_at, p[3])
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def update(row, bases):  # type: ignore[no-untyped-def]
    """Write a part of a tensor, from positions that an operand gives. Result and update are
    contiguous. After the places: the axes, and for each its size, the update's size, and whether
    its position counts (`tape.ops.slicing` writes them)."""
    axes, p = row[PARAMETERS], row[PARAMETERS + 1 :]
    start = np.zeros(MOST_AXES, np.int64)
    given = line_at(address(row, bases, 2), axes)
    count = 1
    for axis in range(axes):
        size, own, counts = p[3 * axis], p[3 * axis + 1], p[3 * axis + 2]
        start[axis] = np.int64(given[axis]) if counts else 0
        start[axis] += size if start[axis] < 0 else 0
        count *= own
        if start[axis] < 0 or start[axis] + own > size:
            return False
    line = p[3 * (axes - 1) + 1]
    source = line_at(address(row, bases, 1), count)
    for number in range(count // line):
        rest, offset, stride = number, start[axes - 1], p[3 * (axes - 1)]
        for axis in range(axes - 2, -1, -1):
            own = p[3 * axis + 1]
            offset += (start[axis] + rest % own) * stride
            rest //= own
            stride *= p[3 * axis]
        target = line_at(address(row, bases, 0) + 4 * offset, line)
        put(target, source[number * line : (number + 1) * line])
    return True
