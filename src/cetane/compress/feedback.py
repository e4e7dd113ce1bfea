"""The loops of second-order rounding, compiled by numba: see `second_order`.

Where rows of a weight matrix are independent, the threads of `kernels.over_rows` share them out.
Import this only to encode. Nothing here calls `kernels`: numba's cache would not notice it change.
"""

import numpy as np
from numba import njit, types

_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]
_Indices = types.uint8[:, ::1]
_Entries = types.Array(types.float32, 3, "C", readonly=True)


@njit(inline="always")
def _nearest(value, levels):  # type: ignore[no-untyped-def]
    """The index of the nearest of some ascending levels."""
    index = 0
    for k in range(len(levels) - 1):  # no early end: the sum of comparisons is vectorised
        index += 2 * value > levels[k] + levels[k + 1]
    return index


@njit(types.void(_Floats, _Matrix, _Indices, _Floats, _Matrix), nogil=True, cache=True)
def round_block(weights, levels, indices, errors, factor):  # type: ignore[no-untyped-def]
    """Round some columns of every row to its levels, from left to right.

    The error of a column moves the columns to its right within the block, by `factor`, the upper
    Cholesky factor of the inverse Hessian. The caller moves the columns right of the block, by
    `errors`.
    """
    size = weights.shape[1]
    for row in range(len(weights)):
        w, own = weights[row], levels[row]
        for j in range(size):
            index = _nearest(w[j], own)
            error = (w[j] - own[index]) / factor[j, j]
            indices[row, j], errors[row, j] = index, error
            for right in range(j + 1, size):
                w[right] -= error * factor[j, right]


@njit(types.void(_Floats, _Matrix, _Indices, _Floats, _Matrix), nogil=True, cache=True)
def descend_block(gradients, levels, indices, changes, hessian):  # type: ignore[no-untyped-def]
    """Choose the best level for some columns of every row, one after another; the others stay.

    `gradients` are (weight − rounded) · Hessian at these columns. `hessian` is the Hessian's
    block of them. Fills `changes`: the new level of each element less the old one.
    """
    size = gradients.shape[1]
    for row in range(len(gradients)):
        g, own = gradients[row], levels[row]
        for j in range(size):
            before = own[indices[row, j]]
            index = _nearest(before + g[j] / hessian[j, j], own)
            change = own[index] - before
            indices[row, j], changes[row, j] = index, change
            if change != 0:
                for right in range(size):
                    g[right] -= change * hessian[j, right]


@njit(types.void(_Floats, _Floats, _Matrix, _Indices, _Floats, _Matrix, _Matrix),
      nogil=True, cache=True)  # fmt: skip
def round_rows(offs, moved, levels, indices, errors, rows, factor):  # type: ignore[no-untyped-def]
    """`round_block` for rows that make up for each other: a row's error moves the rows below it.

    `offs` holds the weights, moved by the rows above. It ends as the errors of the rows, each
    divided by the diagonal of `rows`, which is the upper Cholesky factor of the inverse Hessian of
    the outputs. `moved` is how far the columns left of the block move the weights.
    """
    count, size = offs.shape
    for row in range(count):
        w, own, off = moved[row], levels[row], offs[row]
        for j in range(size):
            w[j] += off[j]
        for j in range(size):
            index = _nearest(w[j], own)
            error = (w[j] - own[index]) / factor[j, j]
            indices[row, j], errors[row, j] = index, error
            off[j] = (off[j] - own[index]) / rows[row, row]
            for right in range(j + 1, size):
                w[right] -= error * factor[j, right]
        for below in range(row + 1, count):
            share, other = rows[row, below], offs[below]
            for j in range(size):
                other[j] -= share * off[j]


@njit(types.void(_Floats, _Matrix, _Indices, _Floats, _Matrix, _Matrix), nogil=True, cache=True)
def descend_rows(gradients, levels, indices, changes, rows, hessian):  # type: ignore[no-untyped-def]
    """`descend_block` for rows whose errors count together. `rows` is the Hessian of the outputs,
    and `gradients` are rows · (weight − rounded) · Hessian."""
    count, size = gradients.shape
    moved = np.empty(size, dtype=np.float32)
    for row in range(count):
        g, own, weight = gradients[row], levels[row], rows[row, row]
        moved[:] = 0
        for j in range(size):
            before = own[indices[row, j]]
            index = _nearest(before + (g[j] / weight - moved[j]) / hessian[j, j], own)
            change = own[index] - before
            indices[row, j], changes[row, j] = index, change
            if change != 0:
                for k in range(size):
                    moved[k] += change * hessian[j, k]
        for other in range(row + 1, count):
            share, theirs = rows[row, other], gradients[other]
            for j in range(size):
                theirs[j] -= share * moved[j]


@njit(inline="always")
def _nearest_vector(vector, entries, costs):  # type: ignore[no-untyped-def]
    """The index of the nearest of some entries `(V, K)`. `costs (K,)` is room to compute in."""
    costs[:] = 0
    for axis in range(len(vector)):
        value, own = vector[axis], entries[axis]
        for k in range(len(costs)):
            off = value - own[k]
            costs[k] += off * off
    return np.argmin(costs)


@njit(types.void(_Floats, _Floats, _Entries, _Entries, _Indices, _Floats, _Matrix, _Entries,
                 _Matrix), nogil=True, cache=True)  # fmt: skip
def round_vectors(offs, moved, entries, seen, indices, errors, rows, views, factor):  # type: ignore[no-untyped-def]
    """`round_rows` for palettes of vectors: V neighbouring rows share an index.

    `entries (S, V, K)` are the palettes of S vectors of rows, and `seen` the same as their outputs
    see them: multiplied by `views (S, V, V)`. The square of an error so multiplied is its cost.
    """
    count, size = offs.shape
    length = entries.shape[1]
    target, costs = np.empty(length, np.float32), np.empty(entries.shape[2], np.float32)
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
            index = _nearest_vector(target, seen[vector], costs)
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


@njit(types.void(_Floats, _Entries, _Entries, _Indices, _Floats, _Matrix, _Entries, _Matrix),
      nogil=True, cache=True)  # fmt: skip
def descend_vectors(gradients, entries, seen, indices, changes, rows, views, hessian):  # type: ignore[no-untyped-def]
    """`descend_rows` for palettes of vectors: V neighbouring rows share an index.

    `entries` and `seen` are as in `round_vectors`, with other views: the upper Cholesky factors of
    the blocks of `rows` that belong to a vector.
    """
    count, size = gradients.shape
    length = entries.shape[1]
    moved = np.empty((length, size), dtype=np.float32)
    target, slope = np.empty(length, np.float32), np.empty(length, np.float32)
    costs = np.empty(entries.shape[2], np.float32)
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
            index = _nearest_vector(target, seen[vector], costs)
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


@njit(types.void(types.Array(types.uint8, 3, "C"), types.Array(types.float32, 2, "C"),
                 types.Array(types.float64, 3, "C"), _Matrix), nogil=True, cache=True)  # fmt: skip
def normal_equations(indices, counts, products, hessian):  # type: ignore[no-untyped-def]
    """Fill `products (groups, K, K)`: to change a group's palette by d costs d · products · d.

    `indices` are (groups, rows, columns). `counts (groups, rows)` says how much a row counts.
    """
    groups, rows, columns = indices.shape
    size = products.shape[1]
    shared = np.empty((size, columns), dtype=np.float32)
    for group in range(groups):
        products[group] = 0
        for row in range(rows):
            index = indices[group, row]
            shared[:] = 0
            for j in range(columns):
                entry = shared[index[j]]
                for k in range(columns):
                    entry[k] += hessian[j, k]
            for entry in range(size):
                for j in range(columns):
                    products[group, entry, index[j]] += counts[group, row] * shared[entry, j]
