"""Products of rows with weights, compiled by numba around the blocks of `vectors`."""

import numpy as np
from numba import carray, njit
from numba.core.dispatcher import Dispatcher

from cetane.mil.fast.forms import PALETTE_BYTES, ROWS, WeightForm
from cetane.mil.fast.intrinsics import pointer
from cetane.mil.fast.vectors import product_of, unpacking_of

MANY = 12
"""The fewest tokens for which rows of weights are unpacked once, for all tokens."""

_FLOATS, _BYTES, _SCALED, _NIBBLES, _HALVES = (int(form) for form in list(WeightForm)[:5])
_unpack_bytes, _unpack_scaled, _unpack_nibbles, _unpack_halves = (
    unpacking_of(form) for form in list(WeightForm)[1:5]
)


def _product(tokens: int) -> Dispatcher:
    """A compiled function that multiplies `ROWS` rows of weights of any form with `tokens` rows of
    inputs; `product_of` describes its other arguments.

    Each form and number of tokens is code of its own, which numba knows only by a name.
    """
    of_floats, of_bytes, of_scaled, of_nibbles, of_halves = (
        product_of(form, tokens) for form in list(WeightForm)[:5]
    )

    @njit(nogil=True)
    def product(form, y, y_stride, x, x_stride, w, scale, blocks, palette, columns):  # type: ignore[no-untyped-def]
        if form == _BYTES:
            of_bytes(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
        elif form == _NIBBLES:
            of_nibbles(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
        elif form == _SCALED:
            of_scaled(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
        elif form == _HALVES:
            of_halves(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
        else:
            of_floats(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)

    return product


_product_1, _product_4 = (_product(tokens) for tokens in (1, 4))
_floats_6 = product_of(WeightForm.FLOATS, 6)
"""Six tokens of floats: their sums fill the registers."""


@njit(nogil=True, cache=True)
def _unpack(form, y, w, blocks, palette, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _unpack_bytes(y, w, blocks, palette, columns)
    elif form == _SCALED:
        _unpack_scaled(y, w, blocks, palette, columns)
    elif form == _HALVES:
        _unpack_halves(y, w, blocks, palette, columns)
    else:
        _unpack_nibbles(y, w, blocks, palette, columns)


@njit(nogil=True, cache=True)
def multiply(  # type: ignore[no-untyped-def]
    form,
    first,
    last,
    y,
    y_stride,
    x,
    x_stride,
    tokens,
    w,
    w_stride,
    scale,
    tables,
    palette_ids,
    columns,
):
    """Fill rows `first .. last` of the product of a weight with `tokens` rows of inputs.

    `y`, `x`, `w`, `scale`, `tables` and `palette_ids` are addresses, int64; `weights.WeightRows`
    describes the last four. `y_stride` and `x_stride` are the floats from a token to the next,
    `w_stride` is the bytes of a row. `columns` is a multiple of `BLOCK`. `first` and `last` are
    multiples of `ROWS`.
    """
    own = np.empty(ROWS * columns if form != _FLOATS and tokens >= MANY else 0, np.float32)
    for row in range(first, last, ROWS):
        shape, weights = form, w + row * w_stride
        blocks, palette = tables + row * (columns >> 3), tables
        if form == _NIBBLES:
            number = np.int64(carray(pointer(palette_ids), row // ROWS + 1, np.int32)[row // ROWS])
            palette = tables + PALETTE_BYTES * number
        scales, results = scale + 4 * row, y + 4 * row
        if len(own):
            _unpack(form, own.ctypes.data, weights, blocks, palette, columns)
            shape, weights = _FLOATS, own.ctypes.data
        token = 0
        while shape == _FLOATS and token + 6 <= tokens:
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            _floats_6(y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns)
            token += 6
        while token + 4 <= tokens:
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            given = y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns
            _product_4(shape, *given)
            token += 4
        while token < tokens:
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            given = y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns
            _product_1(shape, *given)
            token += 1
