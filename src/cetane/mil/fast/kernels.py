"""Attention whose results depend on no order of keys, compiled by numba.

The keys of earlier tokens lie where a cache contract put them: in slots, in a ring, or among the
call's own columns. So a token that is one of four in its call meets its keys in another order than
a token alone, and a plain sum would differ in its last bit. Here each term is first rounded to a
multiple of a number so large that float64 holds every partial sum exactly. Exact sums have no
order.

Import this module only to run attention: numba takes a while to load.
"""

import math

import numpy as np
from numba import njit

from cetane.mil.fast.attend import HIDDEN as HIDDEN_MASK
from cetane.mil.fast.tape.elements import exponential
from cetane.mil.fast.vectors import ROWS, WIDE_LANES, exact_sums

HIDDEN = np.float32(HIDDEN_MASK)
HEADROOM = 17
"""A sum of 2**17 terms within a bound is exact, if each is a multiple of the bound / 2**35."""
_TOP = 52 - 53 + HEADROOM
_ONES = 1.5 * 2.0 ** (_TOP + 1)
"""`_rounder` of 1."""


@njit(inline="always")
def _rounder(bound):  # type: ignore[no-untyped-def]
    """The number that rounds a term within a bound, when it is added and subtracted again."""
    _, exponent = math.frexp(bound)
    return math.ldexp(1.5, exponent + _TOP)


@njit(nogil=True, cache=True)
def _score(row, keys, start, total):  # type: ignore[no-untyped-def]
    """Fill the products of a row `(D,)` with `total`'s number of keys `(D, S)`, from `start`."""
    total[:] = 0
    count = len(total)
    fours = len(row) - len(row) % 4
    for d in range(0, fours, 4):
        a, b, c, e = row[d], row[d + 1], row[d + 2], row[d + 3]
        first, second = keys[d, start : start + count], keys[d + 1, start : start + count]
        third, fourth = keys[d + 2, start : start + count], keys[d + 3, start : start + count]
        for j in range(count):
            total[j] = (((total[j] + a * first[j]) + b * second[j]) + c * third[j]) + e * fourth[j]
    for d in range(fours, len(row)):
        for j in range(count):
            total[j] = total[j] + row[d] * keys[d, start + j]


@njit(nogil=True, fastmath={"contract"})
def _term(weight, value, rounder):  # type: ignore[no-untyped-def]
    """A product as a multiple of the rounder's last bit. The product itself is exact in float64."""
    return (weight * np.float64(value) + rounder) - rounder


@njit(nogil=True, fastmath={"reassoc"}, cache=True)  # of the sum alone: `_term` is its own function
def _sum(weights, values, rounder):  # type: ignore[no-untyped-def]
    """The sum of rounded products: exact, so the compiler may add in any order."""
    total = 0.0
    for j in range(len(weights)):
        total += _term(weights[j], values[j], rounder)
    return total


@njit(nogil=True, cache=True)
def _weigh(scores, mask, weights, ones, sink):  # type: ignore[no-untyped-def]
    """Fill the weights of a row of scores, before their division by the sum. Returns the sum.

    Weights are at most 1. They are not rounded, the terms of their sum are.
    """
    top = sink
    for j in range(len(scores)):
        if mask[j] > HIDDEN:
            scores[j] += mask[j]
            top = max(top, scores[j])
    total = 0.0
    if sink > -np.inf:
        total += _term(np.float64(exponential(sink - top)), np.float32(1), _ONES)
    for j in range(len(scores)):
        weights[j] = exponential(scores[j] - top) if mask[j] > HIDDEN else np.float32(0)
    return total + _sum(weights, ones, _ONES)


@njit(nogil=True, cache=True)
def _largest(values, start, magnitudes):  # type: ignore[no-untyped-def]
    """Fill the largest magnitude of each key's value, of values `(E, S)` from `start`."""
    count = len(magnitudes)
    magnitudes[:] = 0
    for e in range(len(values)):
        line = values[e, start : start + count]
        for j in range(count):  # with numpy's functions: Python's are not computed many at once
            magnitudes[j] = np.fmax(magnitudes[j], np.fabs(line[j]))


@njit(nogil=True, cache=True)
def attend(  # type: ignore[no-untyped-def]
    rows, past_keys, new_keys, past_values, new_values, mask, runs, cap, sinks, results, first, last
):
    """Fill the results `(H, R, E)` of attention of rows `(H, R, D)`, from row `first` of all H * R
    to row `last`.

    Keys `(H, D, S)` and values `(H, E, S)` are in two parts. The last axis of `mask` counts both;
    its other two may have size 1. `runs` are a part (0 or 1), a start, a stop, and the start in
    the mask, of the keys that some row sees. `cap`, if it is positive, bounds scores. `sinks`
    `(H, R)`, if not empty, are scores of one more key, whose value is zero. A row that sees no key
    becomes zeros.
    """
    count = 0
    for run in range(len(runs)):
        count += runs[run, 2] - runs[run, 1]
    scores, seen = np.empty(count, np.float32), np.empty(count, np.float32)
    weights, magnitudes = np.empty(count, np.float64), np.empty(count, np.float32)
    ones, sums = np.ones(count, np.float32), np.empty(results.shape[2], np.float64)
    before = -1
    for own in range(first, last):
        head, row = own // rows.shape[1], own % rows.shape[1]
        if head != before:
            before, at = head, 0
            for run in range(len(runs)):
                part, start, stop = runs[run, 0], runs[run, 1], runs[run, 2]
                values = new_values[head] if part else past_values[head]
                _largest(values, start, magnitudes[at : at + stop - start])
                at += stop - start
        line = mask[min(head, len(mask) - 1), min(row, mask.shape[1] - 1)]
        at = 0
        for run in range(len(runs)):
            part, start, stop = runs[run, 0], runs[run, 1], runs[run, 2]
            keys = new_keys[head] if part else past_keys[head]
            _score(rows[head, row], keys, start, scores[at : at + stop - start])
            seen[at : at + stop - start] = line[runs[run, 3] : runs[run, 3] + stop - start]
            at += stop - start
        if cap > 0:
            for j in range(count):
                scores[j] = np.float32(math.tanh(scores[j] / cap)) * cap
        sink = sinks[head, row] if len(sinks) else np.float32(-np.inf)
        total = _weigh(scores, seen, weights, ones, sink)
        bound = np.float32(0)
        for j in range(count):
            if seen[j] > HIDDEN:
                bound = max(bound, magnitudes[j])
        sums[:] = 0
        if total > 0 and bound > 0:
            rounder = _rounder(np.float64(bound))
            at = 0
            for run in range(len(runs)):
                part, start, stop = runs[run, 0], runs[run, 1], runs[run, 2]
                values = new_values[head] if part else past_values[head]
                many = (stop - start) // WIDE_LANES * WIDE_LANES
                rows_ = len(values) // ROWS * ROWS if many else 0
                for e in range(0, rows_, ROWS):
                    place = values.ctypes.data + 4 * (e * values.shape[1] + start)
                    exact_sums(
                        sums.ctypes.data + 8 * e,
                        weights.ctypes.data + 8 * at,
                        place,
                        values.shape[1],
                        many,
                        rounder,
                    )
                for e in range(len(values)):
                    rest = start + (many if e < rows_ else 0)
                    line = values[e, rest:stop]
                    sums[e] += _sum(weights[at + rest - start : at + stop - start], line, rounder)
                at += stop - start
            for e in range(len(sums)):
                sums[e] /= total
        for e in range(len(sums)):
            results[head, row, e] = np.float32(sums[e])
