"""Attention whose results depend on no order of keys, compiled by numba.

The keys of earlier tokens lie where a cache contract put them: in slots, in a ring, or among the
call's own columns. So a token among four in a call meets its keys in another order than a token
alone. A plain sum would differ in its last bit. Here weights and values are first rounded to
integers of 22 bits, and a sum of integers has no order. The step of a key's values is a fraction of
the largest of them; the step of a row's weights, of the largest weight.

The rows of a head read the same keys and values: these are loaded and rounded once for all of them.

Import this module only to run attention: numba takes a while to load.
"""

import math
from collections.abc import Callable

import numpy as np
from numba import njit
from numba.core.dispatcher import Dispatcher

from cetane.mil.fast.attention_stage import HIDDEN as HIDDEN_MASK
from cetane.mil.fast.attention_vectors import KEYS, PAIR, WIDE_KEYS, mixed_of, scores_of
from cetane.mil.fast.tape.elements import exponential, put
from cetane.mil.fast.vectors import Maker

HIDDEN = np.float32(HIDDEN_MASK)
_F = np.float32
LOW = 11
"""Bits of a low word, and of a high one."""
MOST = (1 << 2 * LOW) - 1
"""The largest integer of a weight; that of a value is half as large."""
SPAN = 640
"""Keys whose products are added in 32 bits. Each adds at most 2**21 + 2**20, all of them less than
2**31."""
_ONE = _F(2.0**32)
"""The integer that stands for 1 in the sum of a row's weights."""
_TINY = _F(2.0**-100)
TOPS = 64
"""Columns of which `largest` keeps the maxima side by side."""
ROWS = 4
"""The most rows that read keys or values together."""


def _by_rows(code_of: Callable[[int], Maker]) -> Dispatcher:
    """A compiled function that calls the code for a number of rows, 1 to `ROWS`, with the other
    arguments.

    Each number of rows is code of its own, which numba knows only by a name.
    """
    one, two, three, four = (code_of(rows) for rows in range(1, ROWS + 1))

    @njit(nogil=True)
    def call(rows, given):  # type: ignore[no-untyped-def]
        if rows == 4:
            four(*given)
        elif rows == 3:
            three(*given)
        elif rows == 2:
            two(*given)
        else:
            one(*given)

    return call


_scores = _by_rows(lambda rows: scores_of(rows, KEYS))
_wide_scores = _by_rows(lambda rows: scores_of(rows, WIDE_KEYS))
_mixed = _by_rows(mixed_of)


@njit(inline="always")
def _words(whole):  # type: ignore[no-untyped-def]
    """An integer as two words, high and low. The low word is signed: products of two low words are
    left out, and are negative as often as positive."""
    high = np.rint(whole * _F(2.0**-LOW))
    return np.int16(high), np.int16(whole - high * _F(1 << LOW))


@njit(inline="always")
def _rounded_up(count, size):  # type: ignore[no-untyped-def]
    return -(-count // size) * size


@njit(nogil=True, cache=True)
def largest(line, tops):  # type: ignore[no-untyped-def]
    """The largest element. `tops` keeps the maxima of columns, so that the loop becomes vectors."""
    tops[:] = -np.inf
    count = len(line) // len(tops) * len(tops)
    for start in range(0, count, len(tops)):
        part = line[start : start + len(tops)]
        for n in range(len(tops)):
            tops[n] = np.fmax(tops[n], part[n])
    top = _F(-np.inf)
    for value in tops:
        top = max(top, value)
    for value in line[count:]:
        top = max(top, value)
    return top


@njit(inline="always")
def _scores_at(keys, stride, rows, scores, j, many):  # type: ignore[no-untyped-def]
    """Fill `WIDE_KEYS` (`many`) or `KEYS` columns of scores from `j`; keys are an address."""
    width, at, y_stride = rows.shape[1], scores.ctypes.data + 4 * j, scores.strides[0]
    for r in range(0, len(rows), ROWS):
        given = (
            at + r * y_stride, y_stride // 4, rows.ctypes.data + 4 * r * width, width, keys, stride,
            width,
        )  # fmt: skip
        if many:
            _wide_scores(min(ROWS, len(rows) - r), given)
        else:
            _scores(min(ROWS, len(rows) - r), given)


@njit(nogil=True, cache=True)
def _score(rows, keys, start, scores, spare):  # type: ignore[no-untyped-def]
    """Fill scores `(R, count)` with the products of rows `(R, D)` and keys `(D, S)` from `start`.
    Up to `KEYS` columns beyond are written."""
    count, (width, stride), first = scores.shape[1], keys.shape, keys.ctypes.data + 4 * start
    wide, whole = count // WIDE_KEYS * WIDE_KEYS, count // KEYS * KEYS
    for j in range(0, wide, WIDE_KEYS):
        _scores_at(first + 4 * j, stride, rows, scores, j, True)
    for j in range(wide, whole, KEYS):
        _scores_at(first + 4 * j, stride, rows, scores, j, False)
    if whole < count:  # memory beyond the keys may not be the array's
        for d in range(width):
            put(spare[d], keys[d, start + whole : start + count])
        _scores_at(spare.ctypes.data, KEYS, rows, scores, whole, False)


@njit(nogil=True, cache=True)
def _round_values(values, start, steps, factors, high, low, at):  # type: ignore[no-untyped-def]
    """Fill the words of values `(E, S)` from `start`, from column `at` on. Fill `steps` with the
    number that 1 stands for in each key's words."""
    count = len(steps)
    steps[:] = 0
    for e in range(len(values)):
        line = values[e, start : start + count]
        for j in range(count):  # NaN stays NaN
            size, known = np.fabs(line[j]), steps[j]
            steps[j] = known if (size <= known) or (known != known) else size
    for j in range(count):
        bound = steps[j]
        factors[j] = _F(MOST // 2) / bound if bound > _TINY else _F(0)
        steps[j] = bound * _F(1 / (MOST // 2))
    for e in range(len(values)):
        line = values[e, start : start + count]
        upper, lower = high[e, at : at + count], low[e, at : at + count]
        for j in range(count):
            upper[j], lower[j] = _words(np.rint(line[j] * factors[j]))


@njit(nogil=True, cache=True)
def _weigh(scores, steps, sink, tops, high, low):  # type: ignore[no-untyped-def]
    """Fill the words of a row's weights, each times the step of its key's values. Hidden keys have
    scores of -inf. Returns the number that 1 stands for in these words."""
    top = max(largest(scores, tops), sink)
    if top == -np.inf:
        return 0.0
    total = np.int64(0)
    for j in range(len(scores)):  # a loop of one purpose becomes vectors
        scores[j] = exponential(scores[j] - top)
    for j in range(len(scores)):
        total += np.int64(scores[j] * _ONE)
    for j in range(len(scores)):
        scores[j] = scores[j] * steps[j] if scores[j] != 0 else _F(0)
    if sink > -np.inf:
        total += np.int64(exponential(sink - top) * _ONE)
    bound, none = largest(scores, tops), 0
    for j in range(len(scores)):
        none += scores[j] != scores[j]
    if none:
        return np.nan
    factor = _F(MOST) / bound if bound > _TINY else _F(0)
    for j in range(len(scores)):
        high[j], low[j] = _words(np.rint(scores[j] * factor))
    return np.float64(bound) / MOST / (np.float64(total) / np.float64(_ONE))


@njit(nogil=True, cache=True)
def _mix(weights, values, sums):  # type: ignore[no-untyped-def]
    """Add the products of weights (2, R or more, keys) and values (2, E, keys), high and low words,
    to sums (R, E, 2); E is a multiple of `PAIR`."""
    rows, (_, most, whole) = len(sums), weights.shape
    for first in range(0, whole, SPAN):
        count = min(SPAN, whole - first)
        for e in range(0, values.shape[1], PAIR):
            for r in range(0, rows, ROWS):
                given = (
                    sums.ctypes.data + 16 * (r * sums.shape[1] + e), 16 * sums.shape[1],
                    weights.ctypes.data + 2 * (r * whole + first),
                    weights.ctypes.data + 2 * ((most + r) * whole + first), 2 * whole,
                    values.ctypes.data + 2 * (e * whole + first),
                    values.ctypes.data + 2 * ((values.shape[1] + e) * whole + first), 2 * whole,
                    count,
                )  # fmt: skip
                _mixed(min(ROWS, rows - r), given)


@njit(inline="always")
def line_of(mask, head, r):  # type: ignore[no-untyped-def]
    """A row's line of a mask, whose first two axes may have size 1."""
    return mask[min(head, len(mask) - 1), min(r, mask.shape[1] - 1)]


@njit(inline="always")
def mask_scores(scores, line, runs, cap):  # type: ignore[no-untyped-def]
    """Bound a row's scores by `cap`, if it is positive, and add its line of the mask. Scores of
    hidden keys become -inf."""
    if cap > 0:
        for j in range(len(scores)):
            scores[j] = np.float32(math.tanh(scores[j] / cap)) * cap
    at = 0
    for run in range(len(runs)):
        size = runs[run, 2] - runs[run, 1]
        part, shown = scores[at : at + size], line[runs[run, 3] : runs[run, 3] + size]
        for j in range(size):
            part[j] = part[j] + shown[j] if shown[j] > HIDDEN else _F(-np.inf)
        at += size


@njit(nogil=True, cache=True)
def _sees(line, runs):  # type: ignore[no-untyped-def]
    """Whether a row of a mask shows a key."""
    for run in range(len(runs)):
        for j in range(runs[run, 3], runs[run, 3] + runs[run, 2] - runs[run, 1]):
            if line[j] > HIDDEN:
                return True
    return False


@njit(nogil=True, cache=True)
def attend_exactly(  # type: ignore[no-untyped-def]
    rows, past_keys, new_keys, past_values, new_values, mask, runs, cap, sinks, results, first, last
):
    """Fill the results `(H, R, E)` of attention of rows `(H, R, D)`, from row `first` of all H * R
    to row `last`.

    Keys `(H, D, S)` and values `(H, E, S)` are in two parts. The last axis of `mask` counts both;
    its other two may have size 1. `runs` are a part (0 or 1), a start, a stop, and the start in
    the mask, of the keys that some row sees. `cap`, if it is positive, bounds scores. `sinks`
    `(H, R)`, if not empty, are scores of one more key, whose value is zero. A row that sees no key,
    a call's padding, becomes zeros and costs nothing.
    """
    count = 0
    for run in range(len(runs)):
        count += runs[run, 2] - runs[run, 1]
    every, width, out = rows.shape[1], rows.shape[2], results.shape[2]
    most, whole, pairs = min(every, last - first), _rounded_up(count, KEYS), _rounded_up(out, PAIR)
    scores, spare = np.empty((most, whole + KEYS), np.float32), np.zeros((width, KEYS), np.float32)
    steps, factors = np.zeros(whole, np.float32), np.empty(count, np.float32)
    values, tops = np.empty((2, pairs, whole), np.int16), np.empty(TOPS, np.float32)
    weights, worth = np.zeros((2, most, whole), np.int16), np.empty(most, np.float64)
    sums, given = np.empty((most, pairs, 2), np.int64), np.empty((most, width), np.float32)
    own_rows = np.empty(most, np.int64)
    while first < last:
        head, start = first // every, first % every
        stop = min(every, start + last - first)
        first += stop - start
        seeing, at = 0, 0
        for r in range(start, stop):
            if _sees(line_of(mask, head, r), runs):
                own_rows[seeing] = r
                put(given[seeing], rows[head, r])
                seeing += 1
            else:
                results[head, r] = 0
        if not seeing:
            continue
        for run in range(len(runs)):
            keys = new_keys[head] if runs[run, 0] else past_keys[head]
            own = new_values[head] if runs[run, 0] else past_values[head]
            size = runs[run, 2] - runs[run, 1]
            _score(given[:seeing], keys, runs[run, 1], scores[:seeing, at : at + size], spare)
            _round_values(
                own, runs[run, 1], steps[at : at + size], factors[at : at + size],
                values[0], values[1], at,
            )  # fmt: skip
            at += size
        for number in range(seeing):
            r = own_rows[number]
            own_scores = scores[number, :count]
            mask_scores(own_scores, line_of(mask, head, r), runs, cap)
            sink = sinks[head, r] if len(sinks) else _F(-np.inf)
            worth[number] = _weigh(
                own_scores, steps, sink, tops, weights[0, number], weights[1, number]
            )
        sums[:] = 0
        _mix(weights, values, sums[:seeing])
        for number in range(seeing):
            result = results[head, own_rows[number]]
            for e in range(out):
                sum_ = (sums[number, e, 0] << LOW) + sums[number, e, 1]
                result[e] = _F(np.float64(sum_) * np.float64(1 << LOW) * worth[number])
