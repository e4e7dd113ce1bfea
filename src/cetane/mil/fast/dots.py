"""Vector code for products of words, integers of 16 bits.

One instruction multiplies 32 pairs of words and adds them by twos (AVX-512 VNNI). Inputs are
rounded to 15 bits, each block with a scale of its own. Weights are integers of 8 bits, or indices
of a palette whose entries are rounded to 14 bits with one scale. The sum of a block is exact, so it
has no order; floats add up the blocks.

A *tile* is `TILE` rows of weights, in two halves of `EIGHT`, block after block. A vector holds four
columns of a half. Every further row of inputs costs one instruction a vector: weights are unpacked
once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.emit import BLOCK, F32, I8, I16, I32, I64
from cetane.mil.fast.forms import DOTTED, VNNI, WeightForm
from cetane.mil.fast.vectors import Maker

TILE, EIGHT = 16, 8
AHEAD = 8192
"""Bytes by which a product's prefetch is ahead of its reads."""
TOKENS = 8
"""Rows of inputs that share a tile's weights in registers."""
MOST = (1 << 14) - 1
"""The largest magnitude of a rounded input."""
MOST_ENTRY = 1 << 13
"""The largest magnitude of a palette's entry. A lane adds 16 products of a block, which stay below
2**31."""
TABLE_BYTES = {WeightForm.NIBBLES: 64, WeightForm.SIXES: 128}
"""Bytes of a palette: 16 words, twice, or 64 words."""

FLOATS, INTS = ir.VectorType(F32, TILE), ir.VectorType(I32, TILE)
WORDS, NARROW = ir.VectorType(I16, BLOCK), ir.VectorType(I8, BLOCK)
_VECTORS = BLOCK // 4
"""Vectors of half a tile in a block."""


def _table(builder: ir.IRBuilder, form: WeightForm, address: ir.Value) -> list[ir.Value]:
    """The vectors of a palette; nothing for other forms."""
    return [
        emit.vector(builder, builder.add(address, emit.number(at)), WORDS)
        for at in range(0, TABLE_BYTES.get(form, 0), 64)
    ]


def _shifted(builder: ir.IRBuilder, words: ir.Value, bits: int) -> ir.Value:
    return builder.lshr(words, ir.Constant(WORDS, [bits] * BLOCK))


def _joined(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, bits: int) -> ir.Value:
    """The words that begin `bits` bits up in `low` and end in `high`."""
    shift = emit.function(builder, f"llvm.fshr.v{BLOCK}i16", WORDS, WORDS, WORDS, WORDS)
    return builder.call(shift, [high, low, ir.Constant(WORDS, [bits] * BLOCK)])


def _weights(
    builder: ir.IRBuilder, form: WeightForm, block: ir.Value, table: list[ir.Value]
) -> list[ir.Value]:
    """The words of half a tile's block; see `weights.in_tiles`."""
    if form in (WeightForm.BYTES, WeightForm.SCALED_BYTES):
        return [
            builder.sext(emit.vector(builder, builder.add(block, emit.number(at)), NARROW), WORDS)
            for at in range(0, EIGHT * BLOCK, BLOCK)
        ]
    packed = [
        emit.vector(builder, builder.add(block, emit.number(at)), WORDS)
        for at in range(0, form.bytes_of(EIGHT * BLOCK), 64)
    ]
    if form is WeightForm.NIBBLES:  # a look-up reads 5 bits: the table lies there twice
        look_up = emit.function(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, WORDS, WORDS)
        indices = [
            _shifted(builder, four, 4 * n) if n else four for four in packed for n in range(4)
        ]
        return [builder.call(look_up, [table[0], index]) for index in indices]
    a, b, c = packed  # a look-up reads 6 bits
    indices = [
        a, _shifted(builder, a, 6), _shifted(builder, b, 2), _shifted(builder, b, 8),
        _shifted(builder, c, 4), _shifted(builder, c, 10), _joined(builder, a, b, 12),
        _joined(builder, b, c, 14),
    ]  # fmt: skip
    look_up = emit.function(
        builder, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, WORDS, WORDS, WORDS
    )
    return [builder.call(look_up, [table[0], index, table[1]]) for index in indices]


def dots_of(form: WeightForm, tokens: int) -> Maker:
    """A function that multiplies a tile with rounded inputs of `tokens` tokens.

    Its arguments are int64, and most are addresses:

    - `y` of the results, float32; `y_stride` is the number of floats from a token to the next;
    - `x` of the inputs, int16 (tokens, columns); `x_scales` of their scales, float32 (tokens,
      blocks);
    - `tile` of the tile; `scales` of the scales of its blocks, float32 (blocks, 16);
    - `one` and `two` of the palettes of its two halves; `row_scales` of its rows' scales, float32;
    - `columns` is the number of columns.
    """

    @intrinsic
    def dots(
        typing: Any, y: Any, y_stride: Any, x: Any, x_scales: Any, tile: Any, scales: Any, one: Any,
        two: Any, row_scales: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if form not in DOTTED:
                return context.get_dummy_value()
            y, y_stride, x, x_scales, tile, scales, one, two, row_scales, columns = given
            tables = [_table(builder, form, address) for address in (one, two)]
            width = builder.lshr(columns, emit.number(3))  # bytes of a token's scales
            inputs_at = [
                builder.add(x, builder.mul(builder.shl(columns, emit.number(1)), emit.number(t)))
                for t in range(tokens)
            ]
            scales_at = [
                builder.add(x_scales, builder.mul(width, emit.number(t))) for t in range(tokens)
            ]
            zero = ir.Constant(FLOATS, [0.0] * TILE)
            loop = emit.Blocks(builder, columns, [zero] * (2 * tokens))
            size = form.bytes_of(TILE * BLOCK)
            block = builder.add(tile, builder.mul(loop.k, emit.number(size // BLOCK)))
            emit.prefetch(builder, builder.add(block, emit.number(AHEAD)), size)
            halves = [
                _weights(builder, form, builder.add(block, emit.number(at)), table)
                for at, table in zip((0, size // 2), tables, strict=True)
            ]
            totals = _block_sums(builder, halves, inputs_at, loop.k)
            factors = _block_scales(builder, form, scales, loop.k)
            offset = builder.lshr(loop.k, emit.number(3))  # 4 bytes for 32 inputs
            sums = []
            for t in range(tokens):
                address = emit.pointer(builder, builder.add(scales_at[t], offset), F32)
                scale = emit.repeated(builder, builder.load(address, align=4))
                for half in range(2):
                    number = 2 * t + half
                    factor = builder.fmul(scale, factors[half]) if factors else scale
                    whole = builder.sitofp(totals[number], FLOATS)
                    sums.append(emit.multiply_add(builder, whole, factor, loop.values[number]))
            loop.end(sums)
            _store(builder, sums, y, y_stride, row_scales)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return dots


def _block_sums(
    builder: ir.IRBuilder, halves: list[list[ir.Value]], inputs_at: list[ir.Value], k: ir.Value
) -> list[ir.Value]:
    """The sums of a block: for each token, one of each half of the tile. `inputs_at` are the
    addresses of the tokens' inputs, and `k` is the block's first column."""
    multiply = emit.function(builder, "llvm.x86.avx512.vpdpwssd.512", INTS, INTS, INTS, INTS)
    totals = [ir.Constant(INTS, [0] * TILE)] * (2 * len(inputs_at))
    for vector in range(_VECTORS):
        for t, inputs in enumerate(inputs_at):
            at = builder.add(inputs, builder.shl(k, emit.number(1)))
            at = builder.add(at, emit.number(8 * vector))
            four = builder.load(emit.pointer(builder, at, I64), align=8)
            words = _repeated_words(builder, four)
            for half in range(2):
                own = builder.bitcast(halves[half][vector], INTS)
                number = 2 * t + half
                totals[number] = builder.call(multiply, [totals[number], own, words])
    return totals


def _store(
    builder: ir.IRBuilder, sums: list[ir.Value], y: ir.Value, y_stride: ir.Value,
    row_scales: ir.Value,
) -> None:  # fmt: skip
    """Store the results of a tile. A row has two lanes of a token's sums; they are added, and
    multiplied with the row's scale."""
    rows = emit.vector(builder, row_scales, FLOATS)
    for t in range(len(sums) // 2):
        place = builder.mul(builder.shl(y_stride, emit.number(2)), emit.number(t))
        address = emit.pointer(builder, builder.add(y, place), FLOATS)
        first, second = sums[2 * t : 2 * t + 2]
        parts = [
            emit.shuffled(builder, first, second, list(range(lane, 2 * TILE, 2)))
            for lane in range(2)
        ]
        builder.store(builder.fmul(builder.fadd(*parts), rows), address, align=4)


def _repeated_words(builder: ir.IRBuilder, four: ir.Value) -> ir.Value:
    """A vector that repeats the same four words."""
    wide = ir.VectorType(I64, TILE // 2)
    nothing = ir.Constant(wide, ir.Undefined)
    one = builder.insert_element(nothing, four, ir.Constant(I32, 0))
    every = ir.Constant(ir.VectorType(I32, TILE // 2), [0] * (TILE // 2))
    return builder.bitcast(builder.shuffle_vector(one, nothing, every), INTS)


def _block_scales(
    builder: ir.IRBuilder, form: WeightForm, scales: ir.Value, k: ir.Value
) -> list[ir.Value]:
    """The scales of a block's rows, for each half; none for forms without scales of blocks."""
    if form is not WeightForm.SCALED_BYTES:
        return []
    address = builder.add(scales, builder.mul(k, emit.number(4 * TILE // BLOCK)))
    rows = emit.vector(builder, address, FLOATS)
    return [
        emit.shuffled(builder, rows, rows, [first + lane // 2 for lane in range(TILE)])
        for first in (0, EIGHT)
    ]


@intrinsic
def round_row(typing: Any, x: Any, rounded: Any, scales: Any, columns: Any) -> Any:
    """Round a row of inputs to words of at most `MOST`, each block with a scale of its own.

    `x`, `rounded` and `scales` are the addresses of the row, float32; of the result, int16; and of
    the scales of the blocks, float32. `columns` is the number of columns.
    """

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        if not VNNI:
            return context.get_dummy_value()
        x, rounded, scales, columns = given
        magnitude = emit.function(builder, "llvm.fabs.v16f32", FLOATS, FLOATS)
        nearest = emit.function(builder, "llvm.rint.v16f32", FLOATS, FLOATS)
        largest = emit.function(builder, "llvm.vector.reduce.fmax.v16f32", F32, FLOATS)
        loop = emit.Blocks(builder, columns, [])
        start = builder.add(x, builder.shl(loop.k, emit.number(2)))
        halves = [
            emit.vector(builder, builder.add(start, emit.number(at)), FLOATS)
            for at in (0, 4 * TILE)
        ]
        one, two = (builder.call(magnitude, [half]) for half in halves)
        larger = builder.select(builder.fcmp_ordered(">", one, two), one, two)
        bound = builder.call(largest, [larger])
        some = builder.fcmp_ordered(">", bound, ir.Constant(F32, 2.0**-100))
        factor = builder.fdiv(ir.Constant(F32, float(MOST)), bound)
        every = emit.repeated(builder, builder.select(some, factor, ir.Constant(F32, 0.0)))
        for number, half in enumerate(halves):
            whole = builder.fptosi(builder.call(nearest, [builder.fmul(half, every)]), INTS)
            narrow = builder.trunc(whole, ir.VectorType(I16, TILE))
            place = builder.add(rounded, builder.shl(loop.k, emit.number(1)))
            place = builder.add(place, emit.number(2 * TILE * number))
            builder.store(narrow, emit.pointer(builder, place, narrow.type), align=2)
        # Integers have no NaN: a NaN among the inputs goes into the scale, and so into the result.
        count = builder.bitcast(builder.fcmp_unordered("uno", *halves), ir.IntType(TILE))
        fine = builder.icmp_unsigned("==", count, ir.Constant(count.type, 0))
        step = builder.fmul(bound, ir.Constant(F32, 1 / MOST))
        step = builder.select(fine, step, ir.Constant(F32, float("nan")))
        place = builder.add(scales, builder.lshr(loop.k, emit.number(3)))  # 4 bytes for 32 inputs
        builder.store(step, emit.pointer(builder, place, F32), align=4)
        loop.end([])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
