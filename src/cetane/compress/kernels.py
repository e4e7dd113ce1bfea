"""The loops over weights, compiled by numba.

Import this module only to encode: numba takes a while to load. The first import on a machine
compiles for some seconds and caches the result. fp16 numbers are bit patterns in uint16, because
numba has no fp16 arithmetic on CPUs. As in numpy, float32 computes, and each result is rounded.
"""

import numpy as np
from numba import njit, types

# Declared types: else numba would compile everything again for a read-only or unaligned array.
_Weights = types.Array(types.uint16, 2, "C", readonly=True, aligned=False)
_Eights = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
_Floats = types.Array(types.float32, 1, "C", readonly=True)


@njit(inline="always")
def _single(pattern):  # type: ignore[no-untyped-def]
    """The finite fp16 number with this bit pattern, as float32."""
    sign = np.uint32(np.uint32(pattern & np.uint16(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(pattern & np.uint16(0x7FFF)) << np.uint32(13))
    return np.uint32(sign | magnitude).view(np.float32) * np.float32(2.0**112)


@njit(inline="always")
def _rounded(x):  # type: ignore[no-untyped-def]
    """A float32 rounded to fp16, ties to even. Wrong for results that are subnormal in fp16."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(13)) & np.uint32(1))
    return np.uint32((bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)


@njit(types.void(_Weights, types.uint16[::1]), nogil=True, cache=True)
def largest(weights, magnitudes):  # type: ignore[no-untyped-def]
    """Fill the fp16 pattern of each row's largest magnitude."""
    for row in range(len(weights)):
        most = np.uint16(0)
        for pattern in weights[row]:
            most = max(most, np.uint16(pattern & np.uint16(0x7FFF)))
        magnitudes[row] = most


@njit(types.void(_Weights, types.uint16[::1], types.uint16[::1]), nogil=True, cache=True)
def extremes(weights, lowest, highest):  # type: ignore[no-untyped-def]
    """Fill the fp16 patterns of each row's least and greatest value."""
    flip = np.int16(0x7FFF)
    for row in range(len(weights)):
        low, high = np.int16(0x7FFF), np.int16(-0x8000)
        for pattern in weights[row]:
            signed = np.int16(pattern)
            # Negative patterns ascend with the magnitude. Flipped, all patterns ascend in value.
            key = np.int16(signed ^ np.int16(np.int16(signed >> np.int16(15)) & flip))
            low, high = min(low, key), max(high, key)
        lowest[row] = np.uint16(low ^ np.int16(np.int16(low >> np.int16(15)) & flip))
        highest[row] = np.uint16(high ^ np.int16(np.int16(high >> np.int16(15)) & flip))


@njit(types.void(_Weights, _Floats, types.int8[:, ::1], types.float32), nogil=True, cache=True)
def linear(weights, scales, data, limit):  # type: ignore[no-untyped-def]
    """Fill `clip(round(weight / scale), -limit, limit)`; zeros where a row's scale is zero.

    A quotient below fp16's normal numbers becomes zero, so `_rounded` may be wrong for it.
    """
    for row in range(len(weights)):
        scale = scales[row]
        if scale == 0:
            data[row] = 0
            continue
        for column in range(weights.shape[1]):
            value = np.rint(_rounded(_single(weights[row, column]) / scale))
            data[row, column] = np.int8(max(min(value, limit), -limit))


@njit(types.void(_Weights, _Floats, _Floats, types.uint8[:, ::1], types.float32),
      nogil=True, cache=True)  # fmt: skip
def uniform(weights, lows, spans, indices, last):  # type: ignore[no-untyped-def]
    """Fill `round((weight - low) / span · last)`; zeros where a row's span is zero.

    `_rounded` may be wrong below fp16's normal numbers. There a difference is exact already, and a
    quotient becomes index zero.
    """
    for row in range(len(weights)):
        low, span = lows[row], spans[row]
        if span == 0:
            indices[row] = 0
            continue
        for column in range(weights.shape[1]):
            fraction = _rounded(_rounded(_single(weights[row, column]) - low) / span)
            indices[row, column] = np.uint8(np.rint(_rounded(fraction * last)))


@njit(types.void(_Eights, types.uint8[:, ::1]), nogil=True, cache=True)
def pack(eights, packed):  # type: ignore[no-untyped-def]
    """Pack eight indices, one a byte, into a row of `bits` bytes.

    The first index takes the lowest bits.
    """
    bits = packed.shape[1]
    spare = np.uint64(8 - bits)
    for row in range(len(eights)):
        word = eights[row]
        # Each step closes the gaps: between bytes, then between pairs, then between fours.
        word = (word & np.uint64(0x00FF00FF00FF00FF)) | (
            (word & np.uint64(0xFF00FF00FF00FF00)) >> spare
        )
        word = (word & np.uint64(0x0000FFFF0000FFFF)) | (
            (word & np.uint64(0xFFFF0000FFFF0000)) >> np.uint64(2 * spare)
        )
        word = (word & np.uint64(0x00000000FFFFFFFF)) | (
            (word & np.uint64(0xFFFFFFFF00000000)) >> np.uint64(4 * spare)
        )
        for byte in range(bits):
            packed[row, byte] = np.uint8(word >> np.uint64(8 * byte))
