"""Products of rows with weights, compiled by numba around the blocks of `vectors`."""

import numpy as np
from numba import carray, njit

from cetane.mil.fast.forms import PALETTE_BYTES, ROWS, WeightForm
from cetane.mil.fast.intrinsics import pointer
from cetane.mil.fast.vectors import product_of, unpacking_of

MANY = 12
"""The fewest tokens for which rows of weights are unpacked once, for all tokens."""

_FLOATS, _BYTES, _SCALED, _NIBBLES, _HALVES = (int(form) for form in list(WeightForm)[:5])
_floats_1, _floats_4, _floats_6 = (product_of(WeightForm.FLOATS, tokens) for tokens in (1, 4, 6))
_bytes_1, _bytes_4 = (product_of(WeightForm.BYTES, tokens) for tokens in (1, 4))
_scaled_1, _scaled_4 = (product_of(WeightForm.SCALED_BYTES, tokens) for tokens in (1, 4))
_nibbles_1, _nibbles_4 = (product_of(WeightForm.NIBBLES, tokens) for tokens in (1, 4))
_halves_1, _halves_4 = (product_of(WeightForm.HALVES, tokens) for tokens in (1, 4))
_unpack_bytes, _unpack_scaled, _unpack_nibbles, _unpack_halves = (
    unpacking_of(form) for form in list(WeightForm)[1:5]
)


@njit(nogil=True, cache=True)
def _one(form, y, y_stride, x, x_stride, w, scale, blocks, palette, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_1(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _NIBBLES:
        _nibbles_1(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _SCALED:
        _scaled_1(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _HALVES:
        _halves_1(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    else:
        _floats_1(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)


@njit(nogil=True, cache=True)
def _four(form, y, y_stride, x, x_stride, w, scale, blocks, palette, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_4(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _NIBBLES:
        _nibbles_4(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _SCALED:
        _scaled_4(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    elif form == _HALVES:
        _halves_4(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)
    else:
        _floats_4(y, y_stride, x, x_stride, w, scale, blocks, palette, columns)


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
    form, first, last, y, y_stride, x, x_stride, tokens, w, w_stride, scale, more, which, columns
):
    """Fill rows `first .. last` of the product of a weight with `tokens` rows of inputs.

    `y`, `x`, `w`, `scale`, `more` and `which` are addresses, int64; `weights.Rows` describes the
    last four. `y_stride` and `x_stride` are the floats from a token to the next, `w_stride` is the
    bytes of a row. `columns` is a multiple of `BLOCK`. `first` and `last` are multiples of `ROWS`.
    """
    own = np.empty(ROWS * columns if form != _FLOATS and tokens >= MANY else 0, np.float32)
    for row in range(first, last, ROWS):
        shape, weights = form, w + row * w_stride
        blocks, palette = more + row * (columns >> 3), more
        if form == _NIBBLES:
            number = np.int64(carray(pointer(which), row // ROWS + 1, np.int32)[row // ROWS])
            palette = more + PALETTE_BYTES * number
        scales, results = scale + 4 * row, y + 4 * row
        if len(own):
            _unpack(form, own.ctypes.data, weights, blocks, palette, columns)
            shape, weights = _FLOATS, own.ctypes.data
        token = 0
        while shape == _FLOATS and token + 6 <= tokens:  # 6 tokens: their sums fill the registers
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            _floats_6(y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns)
            token += 6
        while token + 4 <= tokens:
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            _four(shape, y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns)
            token += 4
        while token < tokens:
            y_at, x_at = results + 4 * token * y_stride, x + 4 * token * x_stride
            _one(shape, y_at, y_stride, x_at, x_stride, weights, scales, blocks, palette, columns)
            token += 1
