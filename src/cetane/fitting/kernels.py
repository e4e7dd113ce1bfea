"""The loops over the elements of a weight that learns, compiled by numba: see `tunable`.

In torch they took longer than the model's own computation. Rows are independent, so the threads of
`cetane.compress.kernels.over_rows` share them.
"""

import numpy as np
from numba import njit, types

_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Vector = types.Array(types.float32, 1, "C", readonly=True)
_Indices = types.Array(types.uint8, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]


@njit(types.void(_Matrix, _Indices, _Floats), nogil=True, cache=True)
def sum_by_level(gradients, indices, sums):  # type: ignore[no-untyped-def]
    """Sum the gradients of a row's elements by their levels, `sums (O, K)`."""
    for row in range(len(gradients)):
        sums[row] = np.float32(0)
        for j in range(gradients.shape[1]):
            sums[row, indices[row, j]] += gradients[row, j]


@njit(types.void(_Matrix, _Matrix, _Vector, _Floats, _Floats, types.uint8[:, ::1], _Floats,
                 _Vector, types.float32), nogil=True, cache=True)  # fmt: skip
def follow(gradients, levels, rates, wanted, means, indices, values, shares, keep):  # type: ignore[no-untyped-def]
    """Move what elements want to be against the mean of their gradients, `rates` a row times
    `shares` a column, and round them to the nearest level; `levels (O, K)` ascend. `keep` is the
    decay of the means."""
    size = indices.shape[1]
    for row in range(len(indices)):
        own, rate, chosen, place = levels[row], rates[row], indices[row], wanted[row]
        for j in range(size):
            means[row, j] = keep * means[row, j] + (np.float32(1) - keep) * gradients[row, j]
            place[j] -= rate * shares[j] * means[row, j]
            chosen[j] = 0
        for k in range(len(own) - 1):  # one border at a time: over elements it is vectorised
            border = np.float32(0.5) * (own[k] + own[k + 1])
            for j in range(size):
                chosen[j] += place[j] > border
        for j in range(size):
            values[row, j] = own[chosen[j]]


@njit(types.void(_Matrix, _Indices, _Floats), nogil=True, cache=True)
def look_up(levels, indices, values):  # type: ignore[no-untyped-def]
    """Give every element the value of its level; `levels` are `(O, K)`."""
    for row in range(len(indices)):
        own = levels[row]
        for j in range(indices.shape[1]):
            values[row, j] = own[indices[row, j]]
