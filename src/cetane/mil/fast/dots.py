"""Vector code for products of bytes: many tokens, whose inputs are rounded to 8 bits.

One instruction multiplies 64 bytes and adds them by fours (AVX-512 VNNI). Weights are unsigned
there, so 128 is added to them, and taken away again as 128 times the sum of a block's inputs.

A *tile* is 16 rows of weights: for each four columns 64 bytes, four of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.emit import BLOCK, F32, FEATURES, I8, I32, SIXTY_FOUR, WIDE
from cetane.mil.fast.vectors import FOUR, ROWS, Form, Maker, folded, palette_vectors, rows_of_floats

TILE = 16
"""Rows of a tile."""
TOKENS = 8
"""Tokens that share a tile's weights in registers."""
HAS_DOTS = WIDE and bool(FEATURES.get("avx512vnni"))

FLOATS, INTS = ir.VectorType(F32, TILE), ir.VectorType(I32, TILE)
_FOURS = BLOCK // 4


def tiling_of(form: Form) -> Maker:
    """A function that writes one group of `ROWS` rows into a tile, as unsigned bytes.

    Palettes are looked up, then rounded to 8 bits with a scale for each block. Its arguments, all
    int64: the addresses of the tile and of its blocks' scales, both counted on to the group's first
    row, of the group's weights and of its palette; the number of columns.
    """

    @intrinsic
    def fill(typing: Any, tile: Any, scales: Any, weights: Any, palette: Any, columns: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if not HAS_DOTS:
                return context.get_dummy_value()
            tile, scales, weights, palette, columns = given
            entries = palette_vectors(builder, form, palette)
            loop = emit.Blocks(builder, columns, [])
            size = form.bytes_of(ROWS * BLOCK)
            block = builder.add(weights, builder.mul(loop.k, emit.number(size // BLOCK)))
            if form is Form.BYTES:
                signed = [
                    emit.vector(builder, builder.add(block, emit.number(half)), SIXTY_FOUR)
                    for half in (0, size // 2)
                ]
            else:
                place = builder.add(scales, builder.mul(loop.k, emit.number(4 * TILE // BLOCK)))
                rows = rows_of_floats(builder, form, weights, weights, entries, loop.k)
                signed = _rounded(builder, rows, place)
            # Four columns of a row are one word. First all rows' first words, then their second.
            upper = ir.Constant(SIXTY_FOUR, [-128] * 64)
            one, two = (builder.bitcast(builder.xor(pair, upper), INTS) for pair in signed)
            target = builder.add(tile, builder.mul(loop.k, emit.number(TILE)))
            for column in range(_FOURS):
                own = emit.shuffled(builder, one, two, [column + _FOURS * r for r in range(ROWS)])
                address = builder.add(target, emit.number(4 * TILE * column))
                builder.store(own, emit.pointer(builder, address, own.type), align=4)
            loop.end([])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return fill


def _rounded(builder: ir.IRBuilder, rows: list[list[ir.Value]], scales: ir.Value) -> list[ir.Value]:
    """A block of rows in int8, two rows in a vector; their scales are stored."""
    bounds = folded(builder, [_top(builder, row) for row in rows], _larger(builder))
    factors, steps = _steps(builder, bounds)
    builder.store(steps, emit.pointer(builder, scales, FOUR), align=4)
    narrow = []
    for number, row in enumerate(rows):
        factor = builder.extract_element(factors, ir.Constant(I32, number))
        whole = _whole(builder, row, factor)
        narrow.append([builder.trunc(half, ir.VectorType(I8, TILE)) for half in whole])
    a, b, c, d = (emit.shuffled(builder, low, high, list(range(BLOCK))) for low, high in narrow)
    return [emit.shuffled(builder, one, two, list(range(64))) for one, two in ((a, b), (c, d))]


def _larger(builder: ir.IRBuilder) -> Callable[[ir.Value, ir.Value], ir.Value]:
    return lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _top(builder: ir.IRBuilder, block: list[ir.Value]) -> ir.Value:
    """The largest magnitudes of a block's two halves."""
    magnitude = emit.function(builder, "llvm.fabs.v16f32", FLOATS, FLOATS)
    return _larger(builder)(*(builder.call(magnitude, [half]) for half in block))


def _steps(builder: ir.IRBuilder, bounds: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Steps a unit and units a step of blocks whose magnitudes have bounds: 127 steps each."""
    zero, most = (ir.Constant(bounds.type, [value] * ROWS) for value in (0.0, 127.0))
    some = builder.fcmp_ordered(">", bounds, zero)
    factors = builder.select(some, builder.fdiv(most, bounds), zero)
    share = ir.Constant(bounds.type, [1 / 127] * ROWS)
    return factors, builder.fmul(bounds, share)


def _whole(builder: ir.IRBuilder, block: list[ir.Value], factor: ir.Value) -> list[ir.Value]:
    """A block of floats in steps."""
    nearest = emit.function(builder, "llvm.rint.v16f32", FLOATS, FLOATS)
    every = emit.alike(builder, factor)
    return [
        builder.fptosi(builder.call(nearest, [builder.fmul(half, every)]), INTS) for half in block
    ]


def dots_of(tokens: int) -> Maker:
    """A function that multiplies a tile with rounded inputs of some tokens.

    Its arguments, all int64: the address of the results and the floats from a token's to the
    next's; that of the inputs, int8 (tokens, columns); of their scales, float32, and of -128 times
    their sums, int32, both (tokens, blocks); of the tile, of its blocks' scales, float32
    (blocks, 16), and of its rows' scales; the number of columns.
    """

    @intrinsic
    def dots(
        typing: Any, y: Any, y_step: Any, x: Any, x_scales: Any, x_sums: Any, tile: Any,
        scales: Any, row_scales: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if not HAS_DOTS:
                return context.get_dummy_value()
            y, y_step, x, x_scales, x_sums, tile, scales, row_scales, columns = given
            multiply = emit.function(
                builder, "llvm.x86.avx512.vpdpbusd.512", INTS, INTS, INTS, INTS
            )
            width = builder.udiv(columns, emit.number(BLOCK // 4))  # bytes of a token's scales
            zero = ir.Constant(FLOATS, [0.0] * TILE)
            loop = emit.Blocks(builder, columns, [zero] * tokens)
            step = builder.udiv(loop.k, emit.number(BLOCK // 4))

            def number_of(base: ir.Value, token: int, kind: ir.Type) -> ir.Value:
                place = builder.add(base, builder.mul(width, emit.number(token)))
                address = emit.pointer(builder, builder.add(place, step), kind)
                return emit.alike(builder, builder.load(address, align=4))

            own = builder.add(tile, builder.mul(loop.k, emit.number(TILE)))
            totals = [number_of(x_sums, token, I32) for token in range(tokens)]
            for four in range(_FOURS):
                weights = emit.vector(builder, builder.add(own, emit.number(4 * TILE * four)), INTS)
                for token in range(tokens):
                    place = builder.add(x, builder.mul(columns, emit.number(token)))
                    place = builder.add(builder.add(place, loop.k), emit.number(4 * four))
                    word = builder.load(emit.pointer(builder, place, I32), align=4)
                    given_ = [totals[token], weights, emit.alike(builder, word)]
                    totals[token] = builder.call(multiply, given_)
            at = builder.add(scales, builder.mul(loop.k, emit.number(4 * TILE // BLOCK)))
            factors = emit.vector(builder, at, FLOATS)
            sums = []
            for token, total in enumerate(totals):
                scale = builder.fmul(number_of(x_scales, token, F32), factors)
                whole = builder.sitofp(total, FLOATS)
                sums.append(emit.multiply_add(builder, whole, scale, loop.values[token]))
            loop.end(sums)
            rows = emit.vector(builder, row_scales, FLOATS)
            for token, total in enumerate(sums):
                place = builder.mul(builder.mul(y_step, emit.number(4)), emit.number(token))
                address = emit.pointer(builder, builder.add(y, place), FLOATS)
                builder.store(builder.fmul(total, rows), address, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return dots


@intrinsic
def round_row(typing: Any, x: Any, rounded: Any, scales: Any, sums: Any, columns: Any) -> Any:
    """Round a row of inputs to int8, each block with a scale of its own.

    The addresses of the row, float32; of the result; of the blocks' scales, float32, and of -128
    times the sums of their integers, int32; the number of columns.
    """

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        if not HAS_DOTS:
            return context.get_dummy_value()
        x, rounded, scales, sums, columns = given
        total = emit.function(builder, "llvm.vector.reduce.add.v16i32", I32, INTS)
        loop = emit.Blocks(builder, columns, [])
        start = builder.add(x, builder.shl(loop.k, emit.number(2)))
        halves = [
            emit.vector(builder, builder.add(start, emit.number(at)), FLOATS)
            for at in (0, 4 * TILE)
        ]
        largest = emit.function(builder, "llvm.vector.reduce.fmax.v16f32", F32, FLOATS)
        bound = builder.call(largest, [_top(builder, halves)])
        every = emit.alike(builder, bound)
        factors, steps = _steps(builder, emit.shuffled(builder, every, every, [0] * ROWS))
        first = ir.Constant(I32, 0)
        whole = _whole(builder, halves, builder.extract_element(factors, first))
        for number, half in enumerate(whole):
            narrow = builder.trunc(half, ir.VectorType(I8, TILE))
            place = builder.add(builder.add(rounded, loop.k), emit.number(TILE * number))
            builder.store(narrow, emit.pointer(builder, place, narrow.type), align=1)
        block = builder.lshr(loop.k, emit.number(3))  # 4 bytes for 32 inputs
        # A step has no way to be no number: the scale is none, and so is the token's result.
        bad = builder.fcmp_unordered("uno", *halves)
        count = builder.bitcast(bad, ir.IntType(TILE))
        fine = builder.icmp_unsigned("==", count, ir.Constant(count.type, 0))
        scale = builder.extract_element(steps, first)
        scale = builder.select(fine, scale, ir.Constant(F32, float("nan")))
        builder.store(scale, emit.pointer(builder, builder.add(scales, block), F32), align=4)
        sum_ = builder.mul(builder.call(total, [builder.add(*whole)]), ir.Constant(I32, -128))
        builder.store(sum_, emit.pointer(builder, builder.add(sums, block), I32), align=4)
        loop.end([])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
