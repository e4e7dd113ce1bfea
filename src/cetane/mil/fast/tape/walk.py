"""Functions of one, two or three operands, element by element: a part of the tape's loop."""

import numpy as np
from numba import njit

from cetane.mil.fast.tape.code import AXES, Opcode
from cetane.mil.fast.tape.elements import combine, transform
from cetane.mil.fast.tape.encoded import (
    KIND,
    OPCODE,
    SIZES,
    STRIDES,
    address,
    brought,
    line_at,
    scatter,
    share_of,
)

_UNARY, _BINARY, _SELECT = (int(code) for code in (Opcode.UNARY, Opcode.BINARY, Opcode.SELECT))


@njit(inline="always")
def _strides(row, place):  # type: ignore[no-untyped-def]
    """The floats from an element to the next along each axis, of an operand or the result (0)."""
    at = STRIDES + AXES * place
    return row[at], row[at + 1], row[at + 2], row[at + 3]


@njit(inline="always")
def _bounds(row, axis, divided, part):  # type: ignore[no-untyped-def]
    """What a thread walks of an axis: its part of the divided one, or a whole other one."""
    return part if axis == divided else (0, row[SIZES + axis])


@njit(inline="always")
def _moved(at, strides, i, j, k):  # type: ignore[no-untyped-def]
    return at + 4 * (i * strides[0] + j * strides[1] + k * strides[2])


@njit(nogil=True, cache=True, error_model="numpy")
def _compute(code, kind, first, second, y, a, b, c):  # type: ignore[no-untyped-def]
    """Fill a line of results from lines of operands."""
    if code == _UNARY:
        transform(kind, y, a, first, second)
    elif code == _BINARY:
        combine(kind, y, a, b)
    else:
        for n in range(len(y)):
            y[n] = b[n] if a[n] != 0 else c[n]


@njit(nogil=True, cache=True, error_model="numpy")
def _compute_apart(row, one, two, addresses, strides, count):  # type: ignore[no-untyped-def]
    """Fill a line of results, where the elements of some line do not lie side by side. Addresses
    and strides (floats) are those of the result and of three operands."""
    code, stride = row[OPCODE], strides[0]
    spare = np.empty((4, count), np.float32)
    y = line_at(addresses[0], count) if stride == 1 else spare[0]
    a = brought(addresses[1], strides[1], spare[1])
    b = a if code == _UNARY else brought(addresses[2], strides[2], spare[2])
    c = a if code != _SELECT else brought(addresses[3], strides[3], spare[3])
    _compute(code, row[KIND], one, two, y, a, b, c)
    if stride != 1:
        scatter(addresses[0], stride, y)


@njit(nogil=True, cache=True, error_model="numpy")
def walk(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A function of one, two or three operands, element by element.

    It makes no arrays in the common case, where all lines lie side by side: an array takes as long
    as a line.
    """
    code, kind, one, two = row[OPCODE], row[KIND], numbers[0], numbers[1]
    divided = 0
    while divided < AXES - 1 and row[SIZES + divided] == 1:
        divided += 1
    part = share_of(row[SIZES + divided], thread, threads, 16 if divided == AXES - 1 else 1)
    first, last = _bounds(row, AXES - 1, divided, part)
    count = last - first
    if count <= 0:
        return
    y_strides, a_strides, b_strides, c_strides = (
        _strides(row, 0), _strides(row, 1), _strides(row, 2), _strides(row, 3)
    )  # fmt: skip
    y_first = address(row, bases, 0) + 4 * first * y_strides[3]
    a_first = address(row, bases, 1) + 4 * first * a_strides[3]
    b_first = address(row, bases, 2) + 4 * first * b_strides[3]
    c_first = address(row, bases, 3) + 4 * first * c_strides[3]
    strides = (y_strides[3], a_strides[3], b_strides[3], c_strides[3])
    side_by_side = (
        strides[0] == 1 and strides[1] == 1 and (code == _UNARY or strides[2] == 1)
        and (code != _SELECT or strides[3] == 1)
    )  # fmt: skip
    for i in range(*_bounds(row, 0, divided, part)):
        for j in range(*_bounds(row, 1, divided, part)):
            for k in range(*_bounds(row, 2, divided, part)):
                y, a = _moved(y_first, y_strides, i, j, k), _moved(a_first, a_strides, i, j, k)
                b, c = _moved(b_first, b_strides, i, j, k), _moved(c_first, c_strides, i, j, k)
                if side_by_side:
                    _compute(
                        code, kind, one, two, line_at(y, count), line_at(a, count),
                        line_at(b, count), line_at(c, count),
                    )  # fmt: skip
                else:
                    _compute_apart(row, one, two, (y, a, b, c), strides, count)
