"""The loops over the elements of a weight that learns, compiled by numba: see `tunable`.

torch would go over a weight some twenty times a step, which took longer than the model's own
computation. Rows are independent, so the threads of `cetane.compress.kernels.over_rows` share them.
"""

import numpy as np
from numba import njit, types

_Matrix = types.Array(types.float32, 2, "C", readonly=True)
_Floats = types.float32[:, ::1]
_Row = types.float32[::1]
_Indices = types.uint8[:, ::1]


@njit(types.void(_Matrix, types.Array(types.uint8, 2, "C", readonly=True), _Floats, _Row),
      nogil=True, cache=True)  # fmt: skip
def sum_by_level(gradients, indices, sums, squares):  # type: ignore[no-untyped-def]
    """Sum the gradients of a row's elements by their levels, `sums (O, K)`; and take the mean of
    their squares, `squares (O,)`."""
    columns = gradients.shape[1]
    for row in range(len(gradients)):
        sums[row] = 0
        total = np.float32(0)
        for j in range(columns):
            gradient = gradients[row, j]
            sums[row, indices[row, j]] += gradient
            total += gradient * gradient
        squares[row] = total / columns


@njit(types.void(_Matrix, _Matrix, types.Array(types.float32, 1, "C", readonly=True), _Floats,
                 _Floats, _Indices, _Floats, types.float32),
      nogil=True, cache=True, fastmath=True)  # fmt: skip
def move(gradients, levels, sizes, means, latents, indices, values, decay):  # type: ignore[no-untyped-def]
    """Move the unrounded copy of every element, and round it to the nearest of its row's levels.

    `means` are of gradients, and decay by `decay`; a row's elements move by `sizes` of them.
    """
    columns, count = gradients.shape[1], levels.shape[1]
    for row in range(len(gradients)):
        own, size = levels[row], sizes[row]
        mean, latent, index = means[row], latents[row], indices[row]
        for j in range(columns):
            mean[j] = decay * mean[j] + (1 - decay) * gradients[row, j]
            latent[j] -= size * mean[j]
            index[j] = 0
        for k in range(count - 1):
            middle = (own[k] + own[k + 1]) / 2
            for j in range(columns):
                index[j] += latent[j] > middle
        for j in range(columns):
            values[row, j] = own[index[j]]
