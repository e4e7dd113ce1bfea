"""The loops of second-order rounding, compiled by numba: see `second_order`.

Where rows of a weight matrix are independent, the threads of `over_rows` share them out.
Import this only to encode. Nothing here calls `kernels`: numba's cache would not notice it change.
"""

import numpy as np
from numba import njit, types

_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]
_Indices = types.uint8[:, ::1]


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

    Of a block of B columns of O rows:

    - `offs (O, B)`: the weights when it begins. A row changes the rows below it. At the end, each
      row is its error, divided by its entry on the diagonal of `rows`.
    - `moved (O, B)`: how far the errors of the columns left of the block move these weights. It is
      overwritten.
    - `levels (O, L)`, `indices (O, B)`, `errors (O, B)`, `factor (B, B)`: as in `round_block`.
    - `rows (O, O)`: the upper Cholesky factor of the inverse Hessian of the outputs.
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
