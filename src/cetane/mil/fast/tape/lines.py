"""Norms, reductions and softmaxes of lines: a part of the tape's loop."""

import math

import numpy as np
from numba import njit

from cetane.mil.fast.tape.code import Opcode, Reduction
from cetane.mil.fast.tape.elements import exponential
from cetane.mil.fast.tape.encoded import (
    KIND,
    OPCODE,
    PARAMETERS,
    address,
    brought,
    line_at,
    scatter,
    share_of,
)

_F = np.float32
_NORM, _REDUCE = int(Opcode.NORM), int(Opcode.REDUCE)
_MEAN, _MAX, _MIN = (int(kind) for kind in (Reduction.MEAN, Reduction.MAX, Reduction.MIN))


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _squares(line):  # type: ignore[no-untyped-def]
    """The sum of squares, in an order that depends only on the number of elements."""
    total = np.float64(0)
    for n in range(len(line)):
        total += np.float64(line[n]) * np.float64(line[n])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def over_lines(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A norm, a reduction or a softmax of lines.

    After the places, the row holds

    - three sizes, whose product is the number of lines;
    - the elements of a line, their stride in the operand, and their stride in the result;
    - for each of the three sizes, the stride from line to line in the operand; then in the result.
    """
    p = row[PARAMETERS:]
    lines, count, stride, result_stride = p[0] * p[1] * p[2], p[3], p[4], p[5]
    first, last = share_of(lines, thread, threads, 1)
    spare, made = np.empty(count, np.float32), np.empty(count, np.float32)
    for number in range(first, last):
        i, j, k = number // (p[1] * p[2]), number // p[2] % p[1], number % p[2]
        x_at = address(row, bases, 1) + 4 * (i * p[6] + j * p[7] + k * p[8])
        y_at = address(row, bases, 0) + 4 * (i * p[9] + j * p[10] + k * p[11])
        line = brought(x_at, stride, spare)
        if row[OPCODE] == _REDUCE:
            line_at(y_at, 1)[0] = _reduced(row[KIND], line)
            continue
        y = line_at(y_at, count) if result_stride == 1 else made
        if row[OPCODE] == _NORM:
            gamma = line_at(address(row, bases, 2), count)
            factor = _F(1 / math.sqrt(_squares(line) / count + numbers[0]))
            for n in range(count):
                y[n] = line[n] * factor * gamma[n]
        else:
            top = line.max()
            total = np.float64(0)
            for n in range(count):
                spare[n] = exponential(line[n] - top)
                total += spare[n]
            factor = _F(1 / total)
            for n in range(count):
                y[n] = spare[n] * factor
        if result_stride != 1:
            scatter(y_at, result_stride, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _reduced(kind, line):  # type: ignore[no-untyped-def]
    if kind == _MAX:
        return line.max()
    if kind == _MIN:
        return line.min()
    total = np.float64(0)
    for value in line:
        total += value
    return _F(total / len(line)) if kind == _MEAN else _F(total)
