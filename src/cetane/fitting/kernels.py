"""The loops over the elements of a weight that learns, compiled by numba: see `loops`.

In torch they took longer than the model's own computation. They are bound by memory, so each reads
what it needs once. Each thread takes one weight, since a model has many.
"""

import numpy as np
from numba import njit, types

_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Vector = types.Array(types.float32, 1, "C", readonly=True)
_Indices = types.Array(types.uint8, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]
_Out = types.float32[::1]
_Entries = types.Array(types.float32, 3, "C", readonly=True)
_REORDER = {"reassoc", "contract"}
"""Sums in any order, so that they are vectorised."""


@njit(types.void(_Matrix, _Indices, _Floats, _Out), nogil=True, cache=True, fastmath=_REORDER)
def gather(gradients, indices, sums, squares):  # type: ignore[no-untyped-def]
    """Sum the gradients of a row's elements by their levels, `sums (O, K)`, and the squares of a
    column's, `squares (I,)`."""
    size = gradients.shape[1]
    own = np.empty((4, sums.shape[1]), np.float32)  # four: each waits for the last addition to it
    squares[:] = np.float32(0)
    for row in range(len(gradients)):
        own[:] = np.float32(0)
        slope, chosen = gradients[row], indices[row]
        whole = size - size % 4
        for j in range(0, whole, 4):
            for lane in range(4):
                own[lane, chosen[j + lane]] += slope[j + lane]
        for j in range(whole, size):
            own[0, chosen[j]] += slope[j]
        for k in range(sums.shape[1]):
            sums[row, k] = own[0, k] + own[1, k] + own[2, k] + own[3, k]
        for j in range(size):
            squares[j] += slope[j] * slope[j]


@njit(types.void(_Matrix, _Matrix, _Vector, _Vector, types.float32, types.float32, types.float32,
                 _Out, _Floats, _Floats, types.uint8[:, ::1], _Floats),
      nogil=True, cache=True, fastmath=_REORDER)  # fmt: skip
def follow(gradients, levels, rates, shares, keep, keep_squares, second,  # type: ignore[no-untyped-def]
           squares, wanted, means, indices, values):  # fmt: skip
    """Move the wish of each element against the mean of its gradients, and round it to the nearest
    level; `levels (O, K)` ascend.

    The step is the row's `rates` times the column's `shares`, over the root of the row's mean
    square. `squares (O,)` are these mean squares, of gradients times `shares`. `second` corrects
    them for their start at zero, as Adam does. `keep` and `keep_squares` are the decays of the
    means.
    """
    size = indices.shape[1]
    one = np.float32(1)
    for row in range(len(indices)):
        own, slope, chosen = levels[row], gradients[row], indices[row]
        place, mean = wanted[row], means[row]
        square = np.float32(0)
        for j in range(size):
            scaled = slope[j] * shares[j]
            square += scaled * scaled
        squares[row] = keep_squares * squares[row] + (one - keep_squares) * square / size
        rate = rates[row] / (np.sqrt(squares[row] / second) + np.float32(1e-20))
        for j in range(size):
            mean[j] = keep * mean[j] + (one - keep) * slope[j]
            place[j] -= rate * shares[j] * mean[j]
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


@njit(types.void(_Matrix, _Indices, types.float32[:, :, ::1]), nogil=True, cache=True)
def gather_vectors(gradients, indices, sums):  # type: ignore[no-untyped-def]
    """Sum the gradients `(O, I)` of a row of vectors by their entries, `sums (O / V, K, V)`;
    `indices (O / V, I)`."""
    length = sums.shape[2]
    for vector in range(len(indices)):
        chosen, own = indices[vector], sums[vector]
        own[:] = np.float32(0)
        for axis in range(length):
            slope = gradients[vector * length + axis]
            for j in range(indices.shape[1]):
                own[chosen[j], axis] += slope[j]


@njit(types.void(_Entries, _Indices, _Floats), nogil=True, cache=True)
def look_up_vectors(entries, indices, values):  # type: ignore[no-untyped-def]
    """Give every vector of V elements, one below the other, its entry; `entries` are `(O / V, K,
    V)`."""
    length = entries.shape[2]
    for vector in range(len(indices)):
        own = entries[vector]
        for axis in range(length):
            for j in range(indices.shape[1]):
                values[vector * length + axis, j] = own[indices[vector, j], axis]
