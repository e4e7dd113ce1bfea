"""Vector code for attention, written in LLVM's own language: scores, and sums of values.

As in `vectors.py`, the order of a row's additions depends on no other row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.emit import F32, FEATURES, FLOATS, I64, INTS, LANES, WIDE
from cetane.mil.fast.forms import VNNI
from cetane.mil.fast.vectors import Maker, folded

KEYS = 2 * LANES
"""Keys that the kernels of attention take at once."""
WORDS = ir.VectorType(emit.I16, KEYS)
"""A word for each of `KEYS` keys."""
PAIR = 2
"""Rows of values that the kernels of attention take at once."""
WIDE_KEYS = 3 * KEYS if WIDE else KEYS
"""Keys whose scores fit the registers. Channels lie far apart in memory, so a kernel reads many
keys of one channel together."""


def scores_of(rows: int, keys: int) -> Maker:
    """A function that multiplies `rows` queries with `keys` keys, in the order of channels.

    Its arguments are int64:

    - `y`, the address of the scores, and `y_stride`, the floats from a row to the next;
    - `x` and `x_stride`, the same for queries;
    - `k`, the address of the keys, and `k_stride`, the floats from a channel to the next;
    - `width`, the number of channels.
    """

    @intrinsic
    def score(
        typing: Any, y: Any, y_stride: Any, x: Any, x_stride: Any, k: Any, k_stride: Any, width: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            y, y_stride, x, x_stride, k, k_stride, width = given
            four, count = emit.number(4), keys // LANES
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            loop = emit.Blocks(builder, width, [zero] * (count * rows), 1)
            channel = builder.add(k, builder.mul(builder.mul(k_stride, four), loop.k))
            parts = [
                emit.vector(builder, builder.add(channel, emit.number(4 * LANES * part)), FLOATS)
                for part in range(count)
            ]
            totals = []
            for row in range(rows):
                place = builder.add(loop.k, builder.mul(x_stride, emit.number(row)))
                place = emit.pointer(builder, builder.add(x, builder.mul(place, four)), F32)
                query = emit.repeated(builder, builder.load(place, align=4))
                totals += [
                    emit.multiply_add(builder, query, part, loop.values[count * row + number])
                    for number, part in enumerate(parts)
                ]
            loop.end(totals)
            for number, total in enumerate(totals):
                place = builder.mul(builder.mul(y_stride, four), emit.number(number // count))
                place = builder.add(place, emit.number(4 * LANES * (number % count)))
                place = emit.pointer(builder, builder.add(y, place), FLOATS)
                builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return score


def _multiplied(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """A sum to which products of words are added in pairs, in any order."""
    if VNNI:
        name = "llvm.x86.avx512.vpdpwssd.512"
        dot = emit.function(builder, name, INTS, INTS, INTS, INTS)
        pairs = [builder.bitcast(part, INTS) for part in (a, b)]
        return builder.call(dot, [total, *pairs])
    if FEATURES.get("avx2") and LANES == 8:
        dot = emit.function(builder, "llvm.x86.avx2.pmadd.wd", INTS, WORDS, WORDS)
        return builder.add(total, builder.call(dot, [a, b]))
    for half in (0, LANES):
        lanes = list(range(half, half + LANES))
        one, two = (builder.sext(emit.shuffled(builder, p, p, lanes), INTS) for p in (a, b))
        total = builder.add(total, builder.mul(one, two))
    return total


def mixed_of(rows: int) -> Maker:
    """A function that adds weights times `PAIR` rows of values to sums of integers, which have no
    order. Weights and values are in two words, high and low; low times low is left out.

    Its arguments are int64:

    - `sums`, the address of the sums, and `sums_stride`, the bytes from a row to the next. A sum is
      two int64: of products of two high words, and of products of a high and a low word;
    - `high` and `low`, the addresses of the words of weights, and `stride`, the bytes from a row to
      the next;
    - `high_values`, `low_values` and `values_stride`, the same for values;
    - `count`, the number of keys, a multiple of `KEYS`.
    """

    @intrinsic
    def mix(
        typing: Any, sums: Any, sums_stride: Any, high: Any, low: Any, stride: Any,
        high_values: Any, low_values: Any, values_stride: Any, count: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            sums, sums_stride, high, low, stride, high_values, low_values, values_stride, count = (
                given
            )
            nothing = ir.Constant(INTS, [0] * LANES)
            loop = emit.Blocks(builder, count, [nothing] * (2 * PAIR * rows), KEYS)
            at = builder.shl(loop.k, emit.number(1))

            def two_words(base: ir.Value, other: ir.Value, stride: ir.Value, row: int) -> Any:
                offset = builder.add(at, builder.mul(stride, emit.number(row)))
                return [emit.vector(builder, builder.add(a, offset), WORDS) for a in (base, other)]

            values = [two_words(high_values, low_values, values_stride, n) for n in range(PAIR)]
            totals = []
            for row in range(rows):
                upper, lower = two_words(high, low, stride, row)
                for pair, (value, rest) in enumerate(values):
                    first, second = loop.values[2 * (PAIR * row + pair) :][:2]
                    totals.append(_multiplied(builder, first, upper, value))
                    second = _multiplied(builder, second, upper, rest)
                    totals.append(_multiplied(builder, second, lower, value))
            loop.end(totals)
            four = ir.VectorType(I64, 2 * PAIR)
            for row in range(rows):
                own = totals[2 * PAIR * row : 2 * PAIR * (row + 1)]
                place = builder.add(sums, builder.mul(sums_stride, emit.number(row)))
                place = emit.pointer(builder, place, four)
                added = builder.sext(folded(builder, own, builder.add), four)
                builder.store(builder.add(builder.load(place, align=8), added), place, align=8)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return mix
