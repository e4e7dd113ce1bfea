"""Products whose inputs are rounded to words, compiled by numba around `dots`."""

import numpy as np
from numba import carray, njit
from numba.core.dispatcher import Dispatcher

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


@njit(inline="always")
def rounds(form):  # type: ignore[no-untyped-def]
    """Whether a product with weights of this form rounds its inputs."""
    return _ANY and form in (_BYTES, _SCALED, _NIBBLES, _SIXES)


def _dots(tokens: int) -> Dispatcher:
    """A compiled function that multiplies a tile of any form with `tokens` rows of rounded inputs;
    `dots_of` describes its other arguments.

    Each form and number of tokens is code of its own, which numba knows only by a name.
    """
    of_bytes, of_scaled, of_nibbles, of_sixes = (
        dots_of(form, tokens)
        for form in (
            WeightForm.BYTES, WeightForm.SCALED_BYTES, WeightForm.NIBBLES, WeightForm.SIXES
        )
    )  # fmt: skip

    @njit(nogil=True)
    def dots(form, y, y_stride, x, x_scales, tile, scales, one, two, rows, columns):  # type: ignore[no-untyped-def]
        if form == _BYTES:
            of_bytes(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
        elif form == _SCALED:
            of_scaled(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
        elif form == _NIBBLES:
            of_nibbles(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)
        else:
            of_sixes(y, y_stride, x, x_scales, tile, scales, one, two, rows, columns)

    return dots


_dots_1, _dots_2, _dots_4, _dots_8 = (_dots(tokens) for tokens in (1, 2, 4, TOKENS))


@njit(inline="always")
def _palette_of(form, palettes, palette_ids, eight):  # type: ignore[no-untyped-def]
    """The address of the palette of `EIGHT` rows; `eight` is their number among such groups."""
    if form != _NIBBLES and form != _SIXES:
        return palettes
    number = np.int64(carray(pointer(palette_ids), eight + 1, np.int32)[eight])
    return palettes + (_FOUR_BITS if form == _NIBBLES else _SIX_BITS) * number


@njit(nogil=True, cache=True)
def multiply_rounded(  # type: ignore[no-untyped-def]
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
        tile, factors, rows = w + row * w_stride, tables + 4 * row * blocks, scale + 4 * row
        one = _palette_of(form, tables, palette_ids, row // EIGHT)
        two = _palette_of(form, tables, palette_ids, row // EIGHT + 1)
        token = 0
        while token < tokens:
            left = tokens - token
            y_at = y + 4 * (row + token * y_stride)
            own, own_scales = x_at + 2 * token * columns, scales_at + 4 * token * blocks
            given = (y_at, y_stride, own, own_scales, tile, factors, one, two, rows, columns)
            # One token less than a pass of 4 or 8 takes a row of padding with it, if there is one.
            left += left in (3, TOKENS - 1) and tokens < every
            if left >= TOKENS:
                _dots_8(form, *given)
                token += TOKENS
            elif left >= 4:
                _dots_4(form, *given)
                token += 4
            elif left >= 2:
                _dots_2(form, *given)
                token += 2
            else:
                _dots_1(form, *given)
                token += 1
