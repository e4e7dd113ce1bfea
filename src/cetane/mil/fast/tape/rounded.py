"""Products whose inputs are rounded to words, compiled by numba around `dots`."""

import numpy as np
from numba import carray, njit

from cetane.mil.fast.dots import EIGHT, TABLE_BYTES, TILE, TOKENS, dots_of, round_row
from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.forms import DOTTED, WeightForm
from cetane.mil.fast.intrinsics import pointer

_BYTES, _SCALED, _NIBBLES, _SIXES = (
    int(form)
    for form in (WeightForm.BYTES, WeightForm.SCALED_BYTES, WeightForm.NIBBLES, WeightForm.SIXES)
)
_FOUR_BITS, _SIX_BITS = TABLE_BYTES[WeightForm.NIBBLES], TABLE_BYTES[WeightForm.SIXES]
_ANY = bool(DOTTED)
_bytes_1, _bytes_2, _bytes_4, _bytes_8 = (dots_of(WeightForm.BYTES, n) for n in (1, 2, 4, TOKENS))
_scaled_1, _scaled_2, _scaled_4, _scaled_8 = (
    dots_of(WeightForm.SCALED_BYTES, n) for n in (1, 2, 4, TOKENS)
)
_nibbles_1, _nibbles_2, _nibbles_4, _nibbles_8 = (
    dots_of(WeightForm.NIBBLES, n) for n in (1, 2, 4, TOKENS)
)
_sixes_1, _sixes_2, _sixes_4, _sixes_8 = (dots_of(WeightForm.SIXES, n) for n in (1, 2, 4, TOKENS))


@njit(inline="always")
def rounds(form):  # type: ignore[no-untyped-def]
    """Whether a product with weights of this form rounds its inputs."""
    return _ANY and form in (_BYTES, _SCALED, _NIBBLES, _SIXES)


# Each form and number of tokens is code of its own, and numba knows code only by a name.


@njit(nogil=True, cache=True)
def _one(form, y, y_stride, x, x_scales, tile, scales, one, two, rows, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_1(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _SCALED:
        _scaled_1(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _NIBBLES:
        _nibbles_1(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    else:
        _sixes_1(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)


@njit(nogil=True, cache=True)
def _two(form, y, y_stride, x, x_scales, tile, scales, one, two, rows, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_2(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _SCALED:
        _scaled_2(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _NIBBLES:
        _nibbles_2(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    else:
        _sixes_2(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)


@njit(nogil=True, cache=True)
def _four(form, y, y_stride, x, x_scales, tile, scales, one, two, rows, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_4(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _SCALED:
        _scaled_4(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _NIBBLES:
        _nibbles_4(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    else:
        _sixes_4(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)


@njit(nogil=True, cache=True)
def _eight(form, y, y_stride, x, x_scales, tile, scales, one, two, rows, columns):  # type: ignore[no-untyped-def]
    if form == _BYTES:
        _bytes_8(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _SCALED:
        _scaled_8(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    elif form == _NIBBLES:
        _nibbles_8(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
    else:
        _sixes_8(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)


@njit(inline="always")
def _palette_of(form, palettes, which, eight):  # type: ignore[no-untyped-def]
    """The address of the palette of `EIGHT` rows; `eight` is their number among such groups."""
    if form != _NIBBLES and form != _SIXES:
        return palettes
    number = np.int64(carray(pointer(which), eight + 1, np.int32)[eight])
    return palettes + (_FOUR_BITS if form == _NIBBLES else _SIX_BITS) * number


@njit(nogil=True, cache=True)
def multiply_rounded(  # type: ignore[no-untyped-def]
    form, first, last, y, y_stride, x, x_stride, tokens, w, w_stride, scale, more, which, columns
):
    """As `products.multiply`, but `first` and `last` are multiples of `TILE`.

    Rows of zeros at the end, a call's padding, cost nothing: their results are zeros.
    """
    blocks = columns // BLOCK
    inputs = np.empty((tokens, columns), np.int16)
    x_scales = np.empty((tokens, blocks), np.float32)
    for t in range(tokens):
        round_row(
            x + 4 * t * x_stride, inputs[t].ctypes.data, x_scales[t].ctypes.data, columns
        )  # fmt: skip
    every = tokens
    while tokens and not x_scales[tokens - 1].any():
        tokens -= 1
        carray(pointer(y + 4 * (tokens * y_stride + first)), last - first, np.float32)[:] = 0
    x_at, scales_at = inputs.ctypes.data, x_scales.ctypes.data
    for row in range(first, last, TILE):
        tile, factors, rows = w + row * w_stride, more + 4 * row * blocks, scale + 4 * row
        one = _palette_of(form, more, which, row // EIGHT)
        two = _palette_of(form, more, which, row // EIGHT + 1)
        token = 0
        while token < tokens:
            left = tokens - token
            y_at = y + 4 * (row + token * y_stride)
            own, own_scales = x_at + 2 * token * columns, scales_at + 4 * token * blocks
            given = (y_at, y_stride, own, own_scales, tile, factors, one, two, rows, columns)
            # One token less than a pass of 4 or 8 takes a row of padding with it, if there is one.
            left += left in (3, TOKENS - 1) and tokens < every
            if left >= TOKENS:
                _eight(form, *given)
                token += TOKENS
            elif left >= 4:
                _four(form, *given)
                token += 4
            elif left >= 2:
                _two(form, *given)
                token += 2
            else:
                _one(form, *given)
                token += 1
