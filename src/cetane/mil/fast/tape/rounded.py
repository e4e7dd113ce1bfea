"""Products of many tokens, whose inputs are rounded to 8 bits, compiled by numba around `dots`."""

import numpy as np
from numba import carray, njit

from cetane.mil.fast.dots import HAS_DOTS, TILE, TOKENS, dots_of, round_row, tiling_of
from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.rows import FEW
from cetane.mil.fast.tape.products import palette_of
from cetane.mil.fast.vectors import ROWS, Form, pointer

_BYTES, _SCALED, _NIBBLES, _SIXES = (
    int(form) for form in (Form.BYTES, Form.SCALED_BYTES, Form.NIBBLES, Form.SIXES)
)
_dots_1, _dots_many = dots_of(1), dots_of(TOKENS)
_fill_bytes, _fill_nibbles, _fill_sixes = (
    tiling_of(form) for form in (Form.BYTES, Form.NIBBLES, Form.SIXES)
)


@njit(inline="always")
def rounds(form, tokens):  # type: ignore[no-untyped-def]
    """Whether a product rounds its inputs: in no call that drafts have, nor for other weights."""
    return HAS_DOTS and tokens > FEW and form in (_BYTES, _SCALED, _NIBBLES, _SIXES)


@njit(nogil=True, cache=True)
def multiply_rounded(  # type: ignore[no-untyped-def]
    form, first, last, y, y_step, x, x_step, tokens, w, w_step, scale, more, which, columns
):
    """As `products.multiply`, but `first` is a multiple of `TILE`."""
    blocks = columns // BLOCK
    inputs = np.empty((tokens, columns), np.int8)
    x_scales, x_sums = np.empty((tokens, blocks), np.float32), np.empty((tokens, blocks), np.int32)
    for t in range(tokens):
        round_row(
            x + 4 * t * x_step, inputs[t].ctypes.data, x_scales[t].ctypes.data,
            x_sums[t].ctypes.data, columns,
        )  # fmt: skip
    tile, spare = np.zeros(TILE * columns, np.uint8), np.empty((tokens, TILE), np.float32)
    scales, row_scales = np.ones((blocks, TILE), np.float32), np.zeros(TILE, np.float32)
    for row in range(first, last, TILE):
        rows = min(TILE, last - row)
        for own in range(0, rows, ROWS):
            at = row + own
            weights, target = w + at * w_step, tile.ctypes.data + 4 * own
            factors = scales.ctypes.data + 4 * own
            row_scales[own : own + ROWS] = carray(pointer(scale + 4 * at), ROWS, np.float32)
            if form in (_BYTES, _SCALED):
                _fill_bytes(target, factors, weights, more, columns)
                if form == _SCALED:
                    start = pointer(more + at * (columns >> 3))
                    scales[:, own : own + ROWS] = carray(start, (blocks, ROWS), np.float32)
            elif form == _NIBBLES:
                palette = palette_of(form, more, which, at)
                _fill_nibbles(target, factors, weights, palette, columns)
            else:
                palette = palette_of(form, more, which, at)
                _fill_sixes(target, factors, weights, palette, columns)
        results, step = y + 4 * row, y_step
        if rows < TILE:  # the next rows are another's, or none
            results, step = spare.ctypes.data, TILE
        token = 0
        while token < tokens:
            many = token + TOKENS <= tokens
            given = (
                results + 4 * token * step, step, inputs[token:].ctypes.data,
                x_scales[token:].ctypes.data, x_sums[token:].ctypes.data, tile.ctypes.data,
                scales.ctypes.data, row_scales.ctypes.data, columns,
            )  # fmt: skip
            if many:
                _dots_many(*given)
            else:
                _dots_1(*given)
            token += TOKENS if many else 1
        if rows < TILE:
            for t in range(tokens):
                carray(pointer(y + 4 * (t * y_step + row)), rows, np.float32)[:] = spare[t, :rows]
