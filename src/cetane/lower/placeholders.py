"""Placeholders: constants of a weight's format and shape, with which a template is converted."""

import numpy as np

from cetane.compress import Format
from cetane.compress.encoded import Affine, Dense, Encoded, Half, Palettized
from cetane.compress.formats import Fp16, Linear, Palette

ONE, INFINITY = 0x3C00, 0x7C00
"""The bit patterns of 1 and of infinity in fp16. All patterns between them are finite numbers."""


def placeholder(number: int, shape: tuple[int, ...], format: Format) -> Encoded:
    """Pseudo-random content in the form of `format` for a weight of `shape`.

    It is the same in every run, and different for every number.
    """
    random = np.random.default_rng(number)
    if isinstance(format, Fp16):
        return Dense(halves(random, shape))
    if isinstance(format, Linear):
        limit = 2 ** (format.bits - 1)
        data = random.integers(1 - limit, limit, shape, np.int8)
        return Affine(data, halves(random, format.scales(shape)), format.bits)
    assert isinstance(format, Palette)
    bits = format.index_bits
    indices = random.integers(0, 1 << bits, format.indices_shape(shape), np.uint8)
    return Palettized(indices, halves(random, format.lut_shape(shape)), bits)


def halves(random: np.random.Generator, shape: tuple[int, ...]) -> Half:
    """Finite fp16 numbers above one."""
    return random.integers(ONE + 1, INFINITY, shape, np.uint16).view(np.float16)
