"""The loop that performs a tape, compiled by numba.

Every thread runs the loop over all instructions. Threads divide a shared instruction; the first
does any other. After an instruction with `wait`, all threads wait for each other.

A token's results depend on no other token of its call: the same operations in the same order make
every element, whatever its place. Import this module only to run a tape: numba takes a while.
"""

import numpy as np
from numba import carray, njit, types

from cetane.mil.fast.dots import TILE
from cetane.mil.fast.exact_attention import attend_exactly
from cetane.mil.fast.forms import ROWS
from cetane.mil.fast.intrinsics import count_up, counted, pointer
from cetane.mil.fast.tape.code import NUMBERS, WIDTH, Opcode, Tape
from cetane.mil.fast.tape.encoded import (
    KIND,
    OPCODE,
    PARAMETERS,
    SHARED,
    WAIT,
    address,
    gather,
    line_at,
    share_of,
    unstrided_address,
)
from cetane.mil.fast.tape.lines import over_lines
from cetane.mil.fast.tape.moves import find_runs, pick, update, widen
from cetane.mil.fast.tape.place import FIRST, RUNS_AT, WEIGHTS
from cetane.mil.fast.tape.products import multiply
from cetane.mil.fast.tape.quick_attention import attend_quickly
from cetane.mil.fast.tape.rounded import multiply_rounded, rounds
from cetane.mil.fast.tape.walk import walk

(_UNARY, _BINARY, _SELECT, _PRODUCT, _NORM, _REDUCE, _SOFTMAX, _RUNS, _ATTEND, _MATMUL, _CONV,
 _PICK, _UPDATE, _WIDEN) = (int(code) for code in Opcode)  # fmt: skip
_yield = types.ExternalFunction("sched_yield", types.int32())
SPINS = 2000
"""Reads of the shared number after which a waiting thread gives its processor away."""


@njit(nogil=True, cache=True, error_model="numpy")
def _attend(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """Attention; kind 1 is exact.

    After the places, the row holds

    - the places of past keys, new keys, past values and new values;
    - the numbers of heads and rows, the widths of keys and values, and the numbers of past and new
      keys;
    - the mask's heads and rows, the offset of the runs, and 1 if there are sinks.
    """
    p = row[PARAMETERS + 8 :]  # after four places
    heads, rows, width, out, past, new = (
        p[0],
        p[1],
        p[2],
        p[3],
        p[4],
        p[5],
    )
    mask_heads, mask_rows, runs_at, with_sinks = (
        p[6],
        p[7],
        p[8],
        p[9],
    )
    start = bases[RUNS_AT] + 8 * runs_at
    count = carray(pointer(start), 1, np.int64)[0]
    runs = carray(pointer(start + 8), 4 * count, np.int64).reshape(count, 4)
    mask = line_at(address(row, bases, 2), mask_heads * mask_rows * (past + new))
    sinks = line_at(address(row, bases, 3), heads * rows * with_sinks)
    given = (
        line_at(address(row, bases, 1), heads * rows * width).reshape(heads, rows, width),
        line_at(unstrided_address(row, bases, 0), heads * width * past).reshape(heads, width, past),
        line_at(unstrided_address(row, bases, 1), heads * width * new).reshape(heads, width, new),
        line_at(unstrided_address(row, bases, 2), heads * out * past).reshape(heads, out, past),
        line_at(unstrided_address(row, bases, 3), heads * out * new).reshape(heads, out, new),
        mask.reshape(mask_heads, mask_rows, past + new),
    )
    results = line_at(address(row, bases, 0), heads * rows * out).reshape(heads, rows, out)
    seen = sinks.reshape(heads * with_sinks, rows)
    first, last = share_of(heads * rows, thread, threads, 1)
    if row[KIND] == 1:
        attend_exactly(*given, runs, numbers[0], seen, results, first, last)
    else:
        attend_quickly(*given, runs, numbers[0], seen, results, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _product(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A product with a weight.

    After the places, the row holds

    - the numbers of tokens, of columns and of rows: columns and rows are padded;
    - the floats from a token to the next in the results and in the inputs, and the bytes of a row
      of weights;
    - the byte offsets of `weights.WeightRows.data`, `scale`, `tables` and `palette_ids`.
    """
    p, base = row[PARAMETERS:], bases[WEIGHTS]
    tokens, columns, rows = p[0], p[1], p[2]
    y_stride, x_stride, w_stride = p[3], p[4], p[5]
    rounded = rounds(row[KIND])
    first, last = share_of(rows, thread, threads, TILE if rounded else ROWS)
    given = (
        row[KIND], first, last, address(row, bases, 0), y_stride, address(row, bases, 1), x_stride,
        tokens, base + p[6], w_stride, base + p[7], base + p[8], base + p[9], columns,
    )  # fmt: skip
    if rounded:
        multiply_rounded(*given)
    else:
        multiply(*given)


@njit(nogil=True, cache=True, error_model="numpy")
def _matmul(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """Products of matrices. After the places: two sizes of batches, rows, inner, columns; then the
    strides of operands and result over the batches, rows or inner, and columns
    (`tape.ops.linear.matmul` writes them)."""
    p = row[PARAMETERS:]
    rows, inner, columns = p[2], p[3], p[4]
    first, last = share_of(p[0] * p[1] * rows, thread, threads, 1)
    sums, line = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for number in range(first, last):
        i, j, r = number // (p[1] * rows), number // rows % p[1], number % rows
        a_at = address(row, bases, 1) + 4 * (i * p[5] + j * p[6] + r * p[7])
        b_at = address(row, bases, 2) + 4 * (i * p[9] + j * p[10])
        y_at = address(row, bases, 0) + 4 * (i * p[13] + j * p[14] + r * p[15])
        sums[:] = 0
        for k in range(inner):
            factor = line_at(a_at + 4 * k * p[8], 1)[0]
            gather(line, b_at + 4 * k * p[11], p[12])
            for c in range(columns):
                sums[c] += factor * line[c]
        y = line_at(y_at, (columns - 1) * p[16] + 1)
        for c in range(columns):
            y[c * p[16]] = sums[c]


@njit(nogil=True, cache=True, error_model="numpy")
def _conv(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A convolution along the last axis. After the places: output and input channels of a group,
    groups, taps, inputs, results; the kernel's stride, dilation and padding; then the strides of
    input and result (`tape.ops.linear.conv` writes them)."""
    p = row[PARAMETERS:]
    outputs, inputs, groups, taps = p[0], p[1], p[2], p[3]
    weights = line_at(address(row, bases, 2), groups * outputs * inputs * taps)
    bias = line_at(address(row, bases, 3), groups * outputs)
    first, last = share_of(groups * outputs, thread, threads, 1)
    for channel in range(first, last):
        group = channel // outputs
        for t in range(p[5]):
            total = bias[channel]
            for i in range(inputs):
                for tap in range(taps):
                    at = t * p[6] + tap * p[7] - p[8]
                    if 0 <= at < p[4]:
                        place = (group * inputs + i) * p[9] + at * p[10]
                        value = line_at(address(row, bases, 1) + 4 * place, 1)[0]
                        total += weights[(channel * inputs + i) * taps + tap] * value
            line_at(address(row, bases, 0) + 4 * (channel * p[11] + t * p[12]), 1)[0] = total


@njit(nogil=True, cache=True, error_model="numpy")
def _wait(shared, goal):  # type: ignore[no-untyped-def]
    """Add 1 to a shared number, and wait until it reaches a goal."""
    count_up(shared)
    looks = 0
    while counted(shared) < goal:
        looks += 1
        if looks > SPINS:
            _yield()


@njit(nogil=True, cache=True, error_model="numpy")
def perform(code, numbers, bases, shared, thread, threads):  # type: ignore[no-untyped-def]
    """Perform a tape, as thread number `thread` of `threads`.

    `code` and `numbers` are the tape's. `bases` are the addresses of its bases, int64. `shared` is
    the address of an int64 that is 0 before any thread starts. Returns -1, or the number of the
    last instruction whose positions lie outside of their tensor.
    """
    goal, failed = 0, -1
    for number in range(len(code)):
        row, own = code[number], numbers[number]
        share = threads if row[SHARED] else 1
        if thread < share:
            if row[OPCODE] == _PRODUCT:
                _product(row, bases, thread, share)
            elif row[OPCODE] <= _SELECT:
                walk(row, own, bases, thread, share)
            elif row[OPCODE] == _NORM or row[OPCODE] == _REDUCE or row[OPCODE] == _SOFTMAX:
                over_lines(row, own, bases, thread, share)
            elif row[OPCODE] == _ATTEND:
                _attend(row, own, bases, thread, share)
            elif row[OPCODE] == _RUNS:
                find_runs(row, bases)
            elif row[OPCODE] == _WIDEN:
                widen(row, bases, thread, share)
            elif row[OPCODE] == _MATMUL:
                _matmul(row, bases, thread, share)
            elif row[OPCODE] == _CONV:
                _conv(row, bases, thread, share)
            elif not (pick(row, bases) if row[OPCODE] == _PICK else update(row, bases)):
                failed = number
        if row[WAIT] and threads > 1:
            goal += threads
            _wait(shared, goal)
    return failed


def compile_() -> None:
    """Compile the loop, or load what numba keeps of it, by performing an empty tape."""
    code, numbers = np.zeros((0, WIDTH), np.int64), np.zeros((0, NUMBERS), np.float32)
    tape = Tape(code, numbers, 0, 0, 0)
    perform(tape.code, tape.numbers, np.zeros(FIRST, np.int64), 0, 0, 1)
