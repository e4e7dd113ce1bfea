"""The loop that performs a tape, compiled by numba.

Every thread runs the loop over all instructions. Threads divide a shared instruction; the first
does any other. After an instruction with `wait`, all threads wait for each other.

A token's results depend on no other token of its call: the same operations in the same order make
every element, whatever its place. Import this module only to run a tape: numba takes a while.
"""

import math

import numpy as np
from numba import carray, njit, types

from cetane.mil.fast.dots import TILE
from cetane.mil.fast.exact_attention import HIDDEN, attend_exactly
from cetane.mil.fast.forms import ROWS
from cetane.mil.fast.intrinsics import count_up, counted, pointer
from cetane.mil.fast.tape.code import (
    AXES,
    FIRST,
    MOST_AXES,
    NUMBERS,
    RUNS_AT,
    WEIGHTS,
    WIDTH,
    Code,
    Reduction,
    Tape,
)
from cetane.mil.fast.tape.elements import combine, exponential, transform
from cetane.mil.fast.tape.products import multiply
from cetane.mil.fast.tape.quick_attention import attend_quickly
from cetane.mil.fast.tape.rounded import multiply_rounded, rounds

_F = np.float32
(_UNARY, _BINARY, _SELECT, _PRODUCT, _NORM, _REDUCE, _SOFTMAX, _RUNS, _ATTEND, _MATMUL, _CONV,
 _PICK, _UPDATE, _WIDEN) = (int(code) for code in Code)  # fmt: skip
_SUM, _MEAN, _MAX, _MIN = (int(kind) for kind in Reduction)
# Columns of an encoded instruction (`code.encoded`).
_PLACES, _SIZES, _STRIDES = 4, 12, 12 + AXES
MORE = 12 + 5 * AXES
_yield = types.ExternalFunction("sched_yield", types.int32())
SPINS = 2000
"""Reads of the shared number after which a waiting thread gives its processor away."""


@njit(inline="always")
def _address(row, bases, place):  # type: ignore[no-untyped-def]
    """The address of an instruction's result (`place` 0), or of its operand `place` from 1 on.

    A row names an array and a first element; `bases` has the arrays' addresses. An element is a
    float of 4 bytes.
    """
    return bases[row[_PLACES + 2 * place]] + 4 * row[_PLACES + 2 * place + 1]


@njit(inline="always")
def _other(row, bases, index):  # type: ignore[no-untyped-def]
    """The address of one of an instruction's further places (`Instruction.others`), from 0 on."""
    return bases[row[MORE + 2 * index]] + 4 * row[MORE + 2 * index + 1]


@njit(inline="always")
def _line(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), count, np.float32)


@njit(inline="always")
def _part(count, thread, threads, unit):  # type: ignore[no-untyped-def]
    """The share of a thread in `count` pieces of work, cut at multiples of `unit`."""
    units = -(-count // unit)
    return (
        min(count, units * thread // threads * unit),
        min(count, units * (thread + 1) // threads * unit),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _gathered(line, address, stride):  # type: ignore[no-untyped-def]
    """Fill a line with elements that lie `stride` floats apart."""
    count = len(line)
    if stride == 0:
        line[:] = _line(address, 1)[0]
    else:
        first = min(0, (count - 1) * stride)  # strides may be negative
        source = _line(address + 4 * first, abs((count - 1) * stride) + 1)
        for i in range(count):
            line[i] = source[i * stride - first]


@njit(inline="always")
def _scattered(address, stride, line):  # type: ignore[no-untyped-def]
    """Write a line to elements that lie `stride` floats apart."""
    target = _line(address, (len(line) - 1) * stride + 1)
    for n in range(len(line)):
        target[n * stride] = line[n]


@njit(inline="always")
def _strides(row, place):  # type: ignore[no-untyped-def]
    """The floats from an element to the next along each axis, of an operand or the result (0)."""
    at = _STRIDES + AXES * place
    return row[at], row[at + 1], row[at + 2], row[at + 3]


@njit(inline="always")
def _bounds(row, axis, divided, part):  # type: ignore[no-untyped-def]
    """What a thread walks of an axis: its part of the divided one, or a whole other one."""
    return part if axis == divided else (0, row[_SIZES + axis])


@njit(inline="always")
def _moved(address, strides, i, j, k):  # type: ignore[no-untyped-def]
    return address + 4 * (i * strides[0] + j * strides[1] + k * strides[2])


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


@njit(inline="always")
def _brought(address, stride, spare):  # type: ignore[no-untyped-def]
    """A line of elements that lie `stride` floats apart: there, or side by side in `spare`."""
    if stride == 1:
        return _line(address, len(spare))
    _gathered(spare, address, stride)
    return spare


@njit(nogil=True, cache=True, error_model="numpy")
def _compute_apart(row, one, two, addresses, strides, count):  # type: ignore[no-untyped-def]
    """Fill a line of results, where the elements of some line do not lie side by side. Addresses
    and strides (floats) are those of the result and of three operands."""
    code, stride = row[0], strides[0]
    spare = np.empty((4, count), np.float32)
    y = _line(addresses[0], count) if stride == 1 else spare[0]
    a = _brought(addresses[1], strides[1], spare[1])
    b = a if code == _UNARY else _brought(addresses[2], strides[2], spare[2])
    c = a if code != _SELECT else _brought(addresses[3], strides[3], spare[3])
    _compute(code, row[3], one, two, y, a, b, c)
    if stride != 1:
        _scattered(addresses[0], stride, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _walk(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A function of one, two or three operands, element by element.

    It makes no arrays in the common case, where all lines lie side by side: an array takes as long
    as a line.
    """
    code, kind, one, two = row[0], row[3], numbers[0], numbers[1]
    divided = 0
    while divided < AXES - 1 and row[_SIZES + divided] == 1:
        divided += 1
    part = _part(row[_SIZES + divided], thread, threads, 16 if divided == AXES - 1 else 1)
    first, last = _bounds(row, AXES - 1, divided, part)
    count = last - first
    if count <= 0:
        return
    y_strides, a_strides, b_strides, c_strides = (
        _strides(row, 0), _strides(row, 1), _strides(row, 2), _strides(row, 3)
    )  # fmt: skip
    y_first = _address(row, bases, 0) + 4 * first * y_strides[3]
    a_first = _address(row, bases, 1) + 4 * first * a_strides[3]
    b_first = _address(row, bases, 2) + 4 * first * b_strides[3]
    c_first = _address(row, bases, 3) + 4 * first * c_strides[3]
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
                        code, kind, one, two, _line(y, count), _line(a, count), _line(b, count),
                        _line(c, count),
                    )  # fmt: skip
                else:
                    _compute_apart(row, one, two, (y, a, b, c), strides, count)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _squares(line):  # type: ignore[no-untyped-def]
    """The sum of squares, in an order that depends only on the number of elements."""
    total = np.float64(0)
    for n in range(len(line)):
        total += np.float64(line[n]) * np.float64(line[n])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _lines(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A norm, a reduction or a softmax of lines.

    After the places, the row holds

    - three sizes, whose product is the number of lines;
    - the elements of a line, their stride in the operand, and their stride in the result;
    - for each of the three sizes, the stride from line to line in the operand; then in the result.
    """
    more = row[MORE:]
    lines, count, stride, result_stride = more[0] * more[1] * more[2], more[3], more[4], more[5]
    first, last = _part(lines, thread, threads, 1)
    spare, made = np.empty(count, np.float32), np.empty(count, np.float32)
    for number in range(first, last):
        i, j, k = number // (more[1] * more[2]), number // more[2] % more[1], number % more[2]
        x_at = _address(row, bases, 1) + 4 * (i * more[6] + j * more[7] + k * more[8])
        y_at = _address(row, bases, 0) + 4 * (i * more[9] + j * more[10] + k * more[11])
        line = _brought(x_at, stride, spare)
        if row[0] == _REDUCE:
            _line(y_at, 1)[0] = _reduced(row[3], line)
            continue
        y = _line(y_at, count) if result_stride == 1 else made
        if row[0] == _NORM:
            gamma = _line(_address(row, bases, 2), count)
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
            _scattered(y_at, result_stride, y)


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


@njit(nogil=True, cache=True, error_model="numpy")
def _runs(row, bases):  # type: ignore[no-untyped-def]
    """Fill the runs of keys that some row of a mask shows: first their number, then four numbers
    for each, as `attend_exactly` reads them. After the places: rows of the mask, past and new keys,
    and the offset of the runs."""
    more = row[MORE:]
    rows, past, new, offset = more[0], more[1], more[2], more[3]
    mask = _line(_address(row, bases, 1), rows * (past + new)).reshape(rows, past + new)
    runs = carray(pointer(bases[row[_PLACES]] + 8 * offset), 1 + 4 * (past + new + 1), np.int64)
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
def _widen(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """Numbers of 8 bits times the scale of their slot. After the places: heads, width, slots, and
    the offset of the runs of slots that are read; -1 for all slots."""
    more = row[MORE:]
    heads, width, slots, runs_at = more[0], more[1], more[2], more[3]
    start = bases[RUNS_AT] + 8 * max(runs_at, 0)
    count = 0 if runs_at < 0 else carray(pointer(start), 1, np.int64)[0]
    runs = carray(pointer(start + 8), 4 * count, np.int64).reshape(count, 4)
    scales = _line(_address(row, bases, 2), heads * slots).reshape(heads, slots)
    codes = bases[row[_PLACES + 2]] + row[_PLACES + 3]
    first, last = _part(heads * width, thread, threads, 1)
    for line in range(first, last):
        y = _line(_address(row, bases, 0) + 4 * line * slots, slots)
        x, own = carray(pointer(codes + line * slots), slots, np.int8), scales[line // width]
        if runs_at < 0:
            _scaled(y, x, own)
        for run in runs:
            if run[0] == 0:
                shown = slice(run[1], run[2])
                _scaled(y[shown], x[shown], own[shown])


@njit(nogil=True, cache=True, error_model="numpy")
def _attend(row, numbers, bases, thread, threads):  # type: ignore[no-untyped-def]
    """Attention; kind 1 is exact.

    After the places, the row holds

    - the places of past keys, new keys, past values and new values;
    - the numbers of heads and rows, the widths of keys and values, and the numbers of past and new
      keys;
    - the mask's heads and rows, the offset of the runs, and 1 if there are sinks.
    """
    more = row[MORE + 8 :]  # after four places
    heads, rows, width, out, past, new = more[0], more[1], more[2], more[3], more[4], more[5]
    mask_heads, mask_rows, runs_at, with_sinks = more[6], more[7], more[8], more[9]
    start = bases[RUNS_AT] + 8 * runs_at
    count = carray(pointer(start), 1, np.int64)[0]
    runs = carray(pointer(start + 8), 4 * count, np.int64).reshape(count, 4)
    mask = _line(_address(row, bases, 2), mask_heads * mask_rows * (past + new))
    sinks = _line(_address(row, bases, 3), heads * rows * with_sinks)
    given = (
        _line(_address(row, bases, 1), heads * rows * width).reshape(heads, rows, width),
        _line(_other(row, bases, 0), heads * width * past).reshape(heads, width, past),
        _line(_other(row, bases, 1), heads * width * new).reshape(heads, width, new),
        _line(_other(row, bases, 2), heads * out * past).reshape(heads, out, past),
        _line(_other(row, bases, 3), heads * out * new).reshape(heads, out, new),
        mask.reshape(mask_heads, mask_rows, past + new),
    )
    results = _line(_address(row, bases, 0), heads * rows * out).reshape(heads, rows, out)
    seen = sinks.reshape(heads * with_sinks, rows)
    first, last = _part(heads * rows, thread, threads, 1)
    if row[3] == 1:
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
    - the byte offsets of `weights.Rows.data`, `scale`, `more` and `which`.
    """
    more, base = row[MORE:], bases[WEIGHTS]
    tokens, columns, rows = more[0], more[1], more[2]
    y_stride, x_stride, w_stride = more[3], more[4], more[5]
    rounded = rounds(row[3])
    first, last = _part(rows, thread, threads, TILE if rounded else ROWS)
    given = (
        row[3], first, last, _address(row, bases, 0), y_stride, _address(row, bases, 1), x_stride,
        tokens, base + more[6], w_stride, base + more[7], base + more[8], base + more[9], columns,
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
    m = row[MORE:]
    rows, inner, columns = m[2], m[3], m[4]
    first, last = _part(m[0] * m[1] * rows, thread, threads, 1)
    sums, line = np.empty(columns, np.float32), np.empty(columns, np.float32)
    for number in range(first, last):
        i, j, r = number // (m[1] * rows), number // rows % m[1], number % rows
        a_at = _address(row, bases, 1) + 4 * (i * m[5] + j * m[6] + r * m[7])
        b_at = _address(row, bases, 2) + 4 * (i * m[9] + j * m[10])
        y_at = _address(row, bases, 0) + 4 * (i * m[13] + j * m[14] + r * m[15])
        sums[:] = 0
        for k in range(inner):
            factor = _line(a_at + 4 * k * m[8], 1)[0]
            _gathered(line, b_at + 4 * k * m[11], m[12])
            for c in range(columns):
                sums[c] += factor * line[c]
        y = _line(y_at, (columns - 1) * m[16] + 1)
        for c in range(columns):
            y[c * m[16]] = sums[c]


@njit(nogil=True, cache=True, error_model="numpy")
def _conv(row, bases, thread, threads):  # type: ignore[no-untyped-def]
    """A convolution along the last axis. After the places: output and input channels of a group,
    groups, taps, inputs, results; the kernel's stride, dilation and padding; then the strides of
    input and result (`tape.ops.linear.conv` writes them)."""
    m = row[MORE:]
    outputs, inputs, groups, taps = m[0], m[1], m[2], m[3]
    weights = _line(_address(row, bases, 2), groups * outputs * inputs * taps)
    bias = _line(_address(row, bases, 3), groups * outputs)
    first, last = _part(groups * outputs, thread, threads, 1)
    for channel in range(first, last):
        group = channel // outputs
        for t in range(m[5]):
            total = bias[channel]
            for i in range(inputs):
                for tap in range(taps):
                    at = t * m[6] + tap * m[7] - m[8]
                    if 0 <= at < m[4]:
                        place = (group * inputs + i) * m[9] + at * m[10]
                        value = _line(_address(row, bases, 1) + 4 * place, 1)[0]
                        total += weights[(channel * inputs + i) * taps + tap] * value
            _line(_address(row, bases, 0) + 4 * (channel * m[11] + t * m[12]), 1)[0] = total


@njit(nogil=True, cache=True, error_model="numpy")
def _pick(row, bases):  # type: ignore[no-untyped-def]
    """Elements in the order of indices. After the places: outer, indices, inner; the strides of
    inner, outer and indices in the operand; the axis' size (`tape.ops.gather` writes them). The
    result is contiguous."""
    m = row[MORE:]
    outer, count, inner = m[0], m[1], m[2]
    order = _line(_address(row, bases, 2), count)
    y = _line(_address(row, bases, 0), outer * count * inner)
    for o in range(outer):
        for n in range(count):
            index = np.int64(order[n])
            index += m[6] if index < 0 else 0
            if not 0 <= index < m[6]:
                return False
            x_at = _address(row, bases, 1) + 4 * (o * m[4] + index * m[5])
            _gathered(y[(o * count + n) * inner : (o * count + n + 1) * inner], x_at, m[3])
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def _update(row, bases):  # type: ignore[no-untyped-def]
    """Write a part of a tensor, from positions that an operand gives. Result and update are
    contiguous. After the places: the axes, and for each its size, the update's size, and whether
    its position counts (`tape.ops.slicing` writes them)."""
    axes, more = row[MORE], row[MORE + 1 :]
    start = np.zeros(MOST_AXES, np.int64)
    given = _line(_address(row, bases, 2), axes)
    count = 1
    for axis in range(axes):
        size, own, counts = more[3 * axis], more[3 * axis + 1], more[3 * axis + 2]
        start[axis] = np.int64(given[axis]) if counts else 0
        start[axis] += size if start[axis] < 0 else 0
        count *= own
        if start[axis] < 0 or start[axis] + own > size:
            return False
    line = more[3 * (axes - 1) + 1]
    update = _line(_address(row, bases, 1), count)
    for number in range(count // line):
        rest, offset, stride = number, start[axes - 1], more[3 * (axes - 1)]
        for axis in range(axes - 2, -1, -1):
            own = more[3 * axis + 1]
            offset += (start[axis] + rest % own) * stride
            rest //= own
            stride *= more[3 * axis]
        target = _line(_address(row, bases, 0) + 4 * offset, line)
        target[:] = update[number * line : (number + 1) * line]
    return True


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
        share = threads if row[2] else 1
        if thread < share:
            if row[0] == _PRODUCT:
                _product(row, bases, thread, share)
            elif row[0] <= _SELECT:
                _walk(row, own, bases, thread, share)
            elif row[0] == _NORM or row[0] == _REDUCE or row[0] == _SOFTMAX:
                _lines(row, own, bases, thread, share)
            elif row[0] == _ATTEND:
                _attend(row, own, bases, thread, share)
            elif row[0] == _RUNS:
                _runs(row, bases)
            elif row[0] == _WIDEN:
                _widen(row, bases, thread, share)
            elif row[0] == _MATMUL:
                _matmul(row, bases, thread, share)
            elif row[0] == _CONV:
                _conv(row, bases, thread, share)
            elif not (_pick(row, bases) if row[0] == _PICK else _update(row, bases)):
                failed = number
        if row[1] and threads > 1:
            goal += threads
            _wait(shared, goal)
    return failed


def compile_() -> None:
    """Compile the loop, or load what numba keeps of it, by performing an empty tape."""
    code, numbers = np.zeros((0, WIDTH), np.int64), np.zeros((0, NUMBERS), np.float32)
    tape = Tape(code, numbers, 0, 0, 0)
    perform(tape.code, tape.numbers, np.zeros(FIRST, np.int64), 0, 0, 1)
