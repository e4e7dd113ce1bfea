"""Attention of many rows, by products of `vectors`. Its sums depend on the order of keys."""

import numpy as np
from numba import njit

from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.exact_attention import TOPS, largest, line_of, mask_scores
from cetane.mil.fast.forms import ROWS, WeightForm
from cetane.mil.fast.tape.elements import exponential, put
from cetane.mil.fast.tape.products import multiply

_F = np.float32
_FLOATS = int(WeightForm.FLOATS)


@njit(inline="always")
def _rounded_up(count):  # type: ignore[no-untyped-def]
    return -(-count // BLOCK) * BLOCK


@njit(nogil=True, cache=True, error_model="numpy")
def _put_keys(part, start, stop, keys, at):  # type: ignore[no-untyped-def]
    """Put keys `start .. stop` of (D, S), as rows from `at` on, where `vectors` expects them."""
    width = keys.shape[1]
    place = keys.reshape(-1)
    for j in range(stop - start):
        row = at + j
        first = row // ROWS * ROWS * width + row % ROWS * BLOCK
        for block in range(0, len(part), BLOCK):
            own = place[first + block * ROWS :]
            for d in range(min(BLOCK, len(part) - block)):
                own[d] = part[block + d, start + j]


@njit(nogil=True, cache=True, error_model="numpy")
def _put_values(part, start, stop, values, at):  # type: ignore[no-untyped-def]
    """Put values `start .. stop` of (E, S), as columns from `at` on."""
    width = values.shape[1]
    place = values.reshape(-1)
    for e in range(len(part)):
        first = e // ROWS * ROWS * width + e % ROWS * BLOCK
        j = start
        while j < stop:
            column = at + j - start
            count = min(stop - j, BLOCK - column % BLOCK)
            target = first + column // BLOCK * ROWS * BLOCK + column % BLOCK
            put(place[target:], part[e, j : j + count])
            j += count


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _total(line):  # type: ignore[no-untyped-def]
    total = _F(0)
    for j in range(len(line)):
        total += line[j]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _times(x, weights, results):  # type: ignore[no-untyped-def]
    """Fill results (n, N) with the product of x (n, K) and weights (N, K), whose elements lie as
    `_put_keys` puts them; N and K are whole blocks."""
    ones = np.ones(len(weights), np.float32)
    here = ones.ctypes.data
    multiply(
        _FLOATS, 0, len(weights), results.ctypes.data, results.shape[1], x.ctypes.data, x.shape[1],
        len(x), weights.ctypes.data, 4 * weights.shape[1], here, here, here, weights.shape[1],
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def attend_quickly(  # type: ignore[no-untyped-def]
    rows, past_keys, new_keys, past_values, new_values, mask, runs, cap, sinks, results, first, last
):
    """Fill the results as `attend_exactly` does, from row `first` of all heads' rows to `last`."""
    count = 0
    for run in runs:
        count += run[2] - run[1]
    width, out, every = rows.shape[2], results.shape[2], rows.shape[1]
    keys = np.zeros((_rounded_up(count), _rounded_up(width)), np.float32)
    values = np.zeros((_rounded_up(out), _rounded_up(count)), np.float32)
    given = np.zeros((every, _rounded_up(width)), np.float32)
    scores = np.empty((every, len(keys)), np.float32)
    mixed, tops = np.empty((every, len(values)), np.float32), np.empty(TOPS, np.float32)
    while first < last:
        head, start = first // every, first % every
        stop = min(every, start + last - first)
        first += stop - start
        for r in range(start, stop):
            put(given[r], rows[head, r])
        at = 0
        for run in runs:
            k = new_keys[head] if run[0] else past_keys[head]
            v = new_values[head] if run[0] else past_values[head]
            _put_keys(k, run[1], run[2], keys, at)
            _put_values(v, run[1], run[2], values, at)
            at += run[2] - run[1]
        _times(given[start:stop], keys, scores[start:stop])
        for r in range(start, stop):
            own = scores[r, :count]
            mask_scores(own, line_of(mask, head, r), runs, cap)
            top = largest(own, tops)
            if len(sinks):
                top = max(top, sinks[head, r])
            top = top if top > _F(-np.inf) else _F(0)
            for j in range(count):
                own[j] = exponential(own[j] - top)
            total = _total(own)
            if len(sinks):
                total += exponential(sinks[head, r] - top)
            factor = _F(1) / total if total > 0 else _F(0)
            for j in range(count):
                own[j] *= factor
            scores[r, count:] = 0
        _times(scores[start:stop], values, mixed[start:stop])
        for r in range(start, stop):
            put(results[head, r], mixed[r, :out])
