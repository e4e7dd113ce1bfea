"""Attention of many rows, by products of `vectors`. Its sums depend on the order of keys."""

import numpy as np
from numba import njit

from cetane.mil.fast.kernels import HIDDEN
from cetane.mil.fast.tape.elements import exponential
from cetane.mil.fast.tape.products import multiply
from cetane.mil.fast.vectors import BLOCK, ROWS, Form

_F = np.float32
_FLOATS = int(Form.FLOATS)


@njit(inline="always")
def _whole(count):  # type: ignore[no-untyped-def]
    return -(-count // BLOCK) * BLOCK


@njit(inline="always")
def _place(row, column, columns):  # type: ignore[no-untyped-def]
    """Where an element lies among blocks of `ROWS` rows."""
    group = row // ROWS * ROWS * columns
    return group + column // BLOCK * ROWS * BLOCK + row % ROWS * BLOCK + column % BLOCK


@njit(nogil=True, cache=True, error_model="numpy")
def _times(x, weights, results):  # type: ignore[no-untyped-def]
    """Fill results (n, N) with the product of x (n, K) and weights (N, K), whose elements lie as
    `_place` says; N and K are whole blocks."""
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
    """Fill the results of heads `first .. last`; otherwise as `kernels.attend`."""
    count = 0
    for run in runs:
        count += run[2] - run[1]
    width, out, every = rows.shape[2], results.shape[2], rows.shape[1]
    keys = np.zeros((_whole(count), _whole(width)), np.float32)
    values = np.zeros((_whole(out), _whole(count)), np.float32)
    given = np.zeros((every, _whole(width)), np.float32)
    scores = np.empty((every, len(keys)), np.float32)
    mixed = np.empty((every, len(values)), np.float32)
    for head in range(first, last):
        given[:, :width] = rows[head]
        at = 0
        for run in runs:
            size = run[2] - run[1]
            k = new_keys[head] if run[0] else past_keys[head]
            v = new_values[head] if run[0] else past_values[head]
            for d in range(width):
                for j in range(size):
                    keys.flat[_place(at + j, d, keys.shape[1])] = k[d, run[1] + j]
            for e in range(out):
                for j in range(size):
                    values.flat[_place(e, at + j, values.shape[1])] = v[e, run[1] + j]
            at += size
        _times(given, keys, scores)
        for r in range(every):
            line = mask[min(head, len(mask) - 1), min(r, mask.shape[1] - 1)]
            own = scores[r]
            if cap > 0:
                for j in range(count):
                    own[j] = np.float32(np.tanh(own[j] / cap)) * cap
            at, top = 0, sinks[head, r] if len(sinks) else _F(-np.inf)
            for run in runs:
                for j in range(run[2] - run[1]):
                    shown = line[run[3] + j]
                    own[at + j] = own[at + j] + shown if shown > HIDDEN else _F(-np.inf)
                    top = max(top, own[at + j])
                at += run[2] - run[1]
            top = top if top > _F(-np.inf) else _F(0)
            total = exponential(sinks[head, r] - top) if len(sinks) else _F(0)
            for j in range(count):
                own[j] = exponential(own[j] - top)
            for j in range(count):
                total += own[j]
            own[count:] = 0
            if total > 0:
                factor = _F(1) / total
                for j in range(count):
                    own[j] *= factor
        _times(scores, values, mixed)
        results[head] = mixed[:, :out]
