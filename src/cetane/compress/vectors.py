"""The loops over short vectors of weights, compiled by numba: palettes whose entries are vectors.

k-means places the entries. Second-order rounding (`VectorRoundingProblem`) chooses among them.

Import this only to encode, as `kernels` says. Nothing here calls `kernels`: numba's cache would not
see it change.
"""

import numpy as np
from numba import njit, types

STEPS = 24
"""The most steps of Lloyd's algorithm."""
SETTLED = 1e-4
"""Lloyd's algorithm ends when a step removes no more than this share of the error."""
TRIALS = 6
"""Candidates that are drawn for each first entry."""
SAMPLE = 1 << 16
"""Evenly spaced vectors of a group that place its entries: at least so many, less than twice as
many. All vectors then get the nearest entry."""

_Vectors = types.Array(types.float32, 3, "C", readonly=True)
_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]
_Indices = types.uint8[:, ::1]
_Draws = types.Array(types.float64, 2, "C", readonly=True)


@njit(inline="always")
def _nearest(vector, entries, distances):  # type: ignore[no-untyped-def]
    """The index of the nearest entry `(V, K)`. Fills `distances (K,)` with squared distances."""
    distances[:] = 0
    for axis in range(len(vector)):
        value, row = vector[axis], entries[axis]
        for entry in range(len(distances)):
            off = value - row[entry]
            distances[entry] += off * off
    return np.argmin(distances)


@njit
def _first_entries(vectors, costs, draws, entries):  # type: ignore[no-untyped-def]
    """k-means++: every entry is a vector, drawn by what it would cost with the entries so far.

    `draws (K, trials)` are even random numbers from 0 to 1. Of the trials the vector that leaves
    the least error is taken (greedy k-means++, as scikit-learn does).
    """
    count, size = vectors.shape
    least, tried, best = np.full(count, np.inf), np.empty(count), np.empty(count)
    sums = np.cumsum(costs.astype(np.float64))
    for entry in range(len(draws)):
        lowest, chosen = np.inf, 0
        for draw in draws[entry]:
            at = min(np.searchsorted(sums, draw * sums[-1], side="right"), count - 1)
            total = 0.0
            for i in range(count):
                distance = 0.0
                for axis in range(size):
                    off = vectors[i, axis] - vectors[at, axis]
                    distance += off * off
                tried[i] = min(least[i], distance)
                total += tried[i] * costs[i]
            if total < lowest:
                lowest, chosen = total, at
                best[:] = tried
        entries[:, entry] = vectors[chosen]
        least[:] = best
        total = 0.0
        for i in range(count):
            total += least[i] * costs[i]
            sums[i] = total


@njit
def _step(vectors, costs, entries, distances):  # type: ignore[no-untyped-def]
    """Move every entry to the mean of the vectors nearest to it; returns what they cost before."""
    size, count = entries.shape
    sums, weights = np.zeros((count, size)), np.zeros(count)
    error = 0.0
    for i in range(len(vectors)):
        entry = _nearest(vectors[i], entries, distances)
        error += costs[i] * distances[entry]
        weights[entry] += costs[i]
        for axis in range(size):
            sums[entry, axis] += costs[i] * vectors[i, axis]
    for entry in range(count):
        if weights[entry] > 0:
            for axis in range(size):
                entries[axis, entry] = sums[entry, axis] / weights[entry]
    return error


@njit(types.void(_Vectors, _Matrix, types.Array(types.float32, 3, "C"), _Draws),
      nogil=True, cache=True)  # fmt: skip
def place(vectors, costs, entries, draws):  # type: ignore[no-untyped-def]
    """Fill the entries `(groups, V, K)` of least squared error for groups of vectors `(groups, N,
    V)`, whose errors are multiplied by costs `(groups, N)` above zero."""
    distances = np.empty(entries.shape[2], dtype=np.float32)
    for group in range(len(vectors)):
        step = max(1, vectors.shape[1] // SAMPLE)
        own, counts = vectors[group, ::step], costs[group, ::step]
        _first_entries(own, counts, draws, entries[group])
        before = np.inf
        for _ in range(STEPS):
            error = _step(own, counts, entries[group], distances)
            if error >= before * (1 - SETTLED):
                break
            before = error


@njit(types.void(_Vectors, _Vectors, _Indices), nogil=True, cache=True)
def choose(vectors, entries, indices):  # type: ignore[no-untyped-def]
    """Fill the index `(groups, N)` of the entry `(groups, V, K)` nearest to every vector."""
    distances = np.empty(entries.shape[2], dtype=np.float32)
    for group in range(len(vectors)):
        for i in range(vectors.shape[1]):
            indices[group, i] = _nearest(vectors[group, i], entries[group], distances)


@njit(types.void(_Floats, _Floats, _Vectors, _Vectors, _Indices, _Floats, _Matrix, _Vectors,
                 _Matrix), nogil=True, cache=True)  # fmt: skip
def round_rows(offs, moved, entries, seen, indices, errors, rows, views, factor):  # type: ignore[no-untyped-def]
    """`feedback.round_rows` for palettes of vectors: V neighbouring rows share an index.

    `entries (S, V, K)` are the palettes of S vectors of rows, and `seen` the same as their outputs
    see them: multiplied by `views (S, V, V)`. The square of an error so multiplied is its cost.
    """
    count, size = offs.shape
    length = entries.shape[1]
    target, distances = np.empty(length, np.float32), np.empty(entries.shape[2], np.float32)
    for vector in range(len(entries)):
        first = vector * length
        for axis in range(length):
            w, off = moved[first + axis], offs[first + axis]
            for j in range(size):
                w[j] += off[j]
        own, view = entries[vector], views[vector]
        for j in range(size):
            for axis in range(length):
                target[axis] = 0
                for other in range(axis + 1):
                    target[axis] += view[axis, other] * moved[first + other, j]
            index = _nearest(target, seen[vector], distances)
            indices[vector, j] = index
            for axis in range(length):
                w = moved[first + axis]
                error = (w[j] - own[axis, index]) / factor[j, j]
                errors[first + axis, j] = error
                for right in range(j + 1, size):
                    w[right] -= error * factor[j, right]
        for axis in range(length):
            for j in range(size):
                offs[first + axis, j] -= own[axis, indices[vector, j]]
        for row in range(first, first + length):
            off = offs[row]
            for j in range(size):
                off[j] /= rows[row, row]
            for below in range(row + 1, count):
                share, other = rows[row, below], offs[below]
                for j in range(size):
                    other[j] -= share * off[j]


@njit(types.void(_Floats, _Vectors, _Vectors, _Indices, _Floats, _Matrix, _Vectors, _Matrix),
      nogil=True, cache=True)  # fmt: skip
def descend_rows(gradients, entries, seen, indices, changes, rows, views, hessian):  # type: ignore[no-untyped-def]
    """`feedback.descend_rows` for palettes of vectors: V neighbouring rows share an index.

    `entries` and `seen` are as in `round_rows`, with other views: the upper Cholesky factors of
    the blocks of `rows` that belong to a vector.
    """
    count, size = gradients.shape
    length = entries.shape[1]
    moved = np.empty((length, size), dtype=np.float32)
    target, slope = np.empty(length, np.float32), np.empty(length, np.float32)
    distances = np.empty(entries.shape[2], np.float32)
    for vector in range(len(entries)):
        first, own, view = vector * length, entries[vector], views[vector]
        moved[:] = 0
        for j in range(size):
            before = indices[vector, j]
            for axis in range(length):
                slope[axis] = gradients[first + axis, j]
                for other in range(length):
                    slope[axis] -= rows[first + axis, first + other] * moved[other, j]
            for axis in range(length):  # view is upper: view.T @ step = slope
                step = slope[axis] / hessian[j, j]
                for other in range(axis):
                    step -= view[other, axis] * target[other]
                target[axis] = step / view[axis, axis]
            for axis in range(length):
                target[axis] += seen[vector, axis, before]
            index = _nearest(target, seen[vector], distances)
            indices[vector, j] = index
            for axis in range(length):
                change = own[axis, index] - own[axis, before]
                changes[first + axis, j] = change
                if index != before:
                    for k in range(size):
                        moved[axis, k] += change * hessian[j, k]
        for other in range(first + length, count):
            for axis in range(length):
                share, theirs = rows[first + axis, other], gradients[other]
                for j in range(size):
                    theirs[j] -= share * moved[axis, j]
