"""An encoded instruction as the compiled loop reads it: columns, addresses, lines of floats.

`assembly.encoded` writes the columns.
"""

import numpy as np
from numba import carray, njit

from cetane.mil.fast.intrinsics import pointer
from cetane.mil.fast.tape.code import AXES

OPCODE, WAIT, SHARED, KIND = range(4)
PLACES, SIZES, STRIDES = 4, 12, 12 + AXES
PARAMETERS = 12 + 5 * AXES
"""Columns of a row: what to do, whether threads wait after it or share it, and the kind; then the
first columns of places, of sizes, of strides, and of the unstrided places and the parameters."""


@njit(inline="always")
def address(row, bases, place):  # type: ignore[no-untyped-def]
    """The address of an instruction's result (`place` 0), or of its operand `place` from 1 on.

    A row names an array and a first element; `bases` has the arrays' addresses. An element is a
    float of 4 bytes.
    """
    return bases[row[PLACES + 2 * place]] + 4 * row[PLACES + 2 * place + 1]


@njit(inline="always")
def unstrided_address(row, bases, index):  # type: ignore[no-untyped-def]
    """The address of one of an instruction's `unstrided` places, from 0 on."""
    return bases[row[PARAMETERS + 2 * index]] + 4 * row[PARAMETERS + 2 * index + 1]


@njit(inline="always")
def line_at(at, count):  # type: ignore[no-untyped-def]
    """The float32 numbers at an address, `(count,)`."""
    return carray(pointer(at), count, np.float32)


@njit(inline="always")
def share_of(count, thread, threads, unit):  # type: ignore[no-untyped-def]
    """The share of a thread in `count` pieces of work, cut at multiples of `unit`."""
    units = -(-count // unit)
    return (
        min(count, units * thread // threads * unit),
        min(count, units * (thread + 1) // threads * unit),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def gather(line, at, stride):  # type: ignore[no-untyped-def]
    """Fill a line with the elements from an address on that lie `stride` floats apart."""
    count = len(line)
    if stride == 0:
        line[:] = line_at(at, 1)[0]
    else:
        first = min(0, (count - 1) * stride)  # strides may be negative
        source = line_at(at + 4 * first, abs((count - 1) * stride) + 1)
        for i in range(count):
            line[i] = source[i * stride - first]


@njit(inline="always")
def scatter(at, stride, line):  # type: ignore[no-untyped-def]
    """Write a line to elements that lie `stride` floats apart."""
    target = line_at(at, (len(line) - 1) * stride + 1)
    for n in range(len(line)):
        target[n * stride] = line[n]


@njit(inline="always")
def brought(at, stride, spare):  # type: ignore[no-untyped-def]
    """A line of elements that lie `stride` floats apart: there, or side by side in `spare`."""
    if stride == 1:
        return line_at(at, len(spare))
    gather(spare, at, stride)
    return spare
