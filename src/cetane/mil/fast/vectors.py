"""Vector code for sums, written in LLVM's own language, and what threads need to share work.

A product of a row of weights and a row of inputs adds `LANES` sums side by side. Its order depends
on no other row, so a token has the same result alone and among others, bit for bit. numba's own
vectors promise no order.

A form of weights differs only in the way from its bytes to floats (`_floats`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.compiled import keep_by_code
from cetane.mil.fast.emit import (
    BLOCK,
    BYTES,
    F32,
    FEATURES,
    FLOATS,
    HALVES,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    SIXTY_FOUR,
    WIDE,
)  # fmt: skip

keep_by_code()  # before any function is compiled: all compiled modules import this one
AHEAD = 2048
"""Bytes between what a product reads and what it asks memory for."""
ROWS = 4
"""Rows that a product computes at once. Their first blocks lie side by side, then their second
ones, and so on: memory is read in order. Rows of zeros fill the last ones."""


class Form(IntEnum):
    """The forms of a weight `(N, K)`."""

    FLOATS = 0
    """float32."""
    BYTES = 1
    """int8."""
    SCALED_BYTES = 2
    """int8, with a float32 scale for each block; scales lie as blocks do."""
    NIBBLES = 3
    """Indices of 4 bits into a palette of 16 floats, two in a byte (see `weights.in_nibbles`)."""
    HALVES = 4
    """float16."""
    SIXES = 5
    """Indices of 6 bits into a palette of 64 floats (see `weights.in_sixes`). The palette is 64
    third bytes, then the second ones and the first; those of floats that halves hold end so."""

    def bytes_of(self, weights: int) -> int:
        """The bytes of so many weights; they are whole blocks."""
        bits = {Form.FLOATS: 32, Form.HALVES: 16, Form.NIBBLES: 4, Form.SIXES: 6}.get(self, 8)
        return weights * bits // 8


READABLE = {Form.FLOATS, Form.BYTES, Form.SCALED_BYTES, Form.HALVES}
"""The forms that this processor reads. The others need its instructions that look up."""
if FEATURES.get("avx2"):
    READABLE.add(Form.NIBBLES)
if WIDE and FEATURES.get("avx512vbmi"):
    READABLE.add(Form.SIXES)

ENTRIES = {Form.NIBBLES: 16, Form.SIXES: 64}
"""Entries of a palette; a smaller one is filled with zeros."""
PALETTE_BYTES = {Form.NIBBLES: 64, Form.SIXES: 192}

FOUR = ir.VectorType(F32, ROWS)
WORDS = ir.VectorType(ir.IntType(16), 32)
Maker = Callable[..., Any]


def _looked_up(builder: ir.IRBuilder, palette: list[ir.Value], indices: ir.Value) -> ir.Value:
    """Entries of a palette, whose 16 floats are in one or two vectors."""
    if WIDE:
        permute = emit.function(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, FLOATS, INTS)
        return builder.call(permute, [palette[0], indices])
    permute = emit.function(builder, "llvm.x86.avx2.permps", FLOATS, FLOATS, INTS)
    low, high = (builder.call(permute, [half, indices]) for half in palette)
    upper = builder.icmp_signed(
        "<",
        builder.shl(indices, ir.Constant(INTS, [28] * LANES)),
        ir.Constant(INTS, [0] * LANES),
    )
    return builder.select(upper, high, low)


def _indices_of_sixes(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """The indices of two rows of a block, a byte each, as `in_sixes` orders them. What the two
    upper bits of a byte hold counts for nothing."""
    size = Form.SIXES.bytes_of(2 * BLOCK)
    shown = ir.Constant(ir.VectorType(ir.IntType(1), 64), [int(at < size) for at in range(64)])
    kinds = (I8.as_pointer(), I32, shown.type, SIXTY_FOUR)
    load = emit.function(builder, "llvm.masked.load.v64i8.p0", SIXTY_FOUR, *kinds)
    nothing = ir.Constant(SIXTY_FOUR, [0] * 64)
    place = emit.pointer(builder, block, I8)
    packed = builder.call(load, [place, ir.Constant(I32, 1), shown, nothing])
    # Six bytes to every eight, then eight indices.
    spread = [at // 8 * 6 + min(at % 8, 5) for at in range(64)]
    eights = emit.shuffled(builder, packed, nothing, spread)
    cut = emit.function(
        builder, "llvm.x86.avx512.pmultishift.qb.512", SIXTY_FOUR, SIXTY_FOUR, SIXTY_FOUR
    )
    shifts = ir.Constant(SIXTY_FOUR, [6 * (at % 8) for at in range(64)])
    return builder.call(cut, [shifts, eights])


def _sixes(builder: ir.IRBuilder, block: ir.Value, palette: list[ir.Value]) -> list[list[ir.Value]]:
    """The weights of two rows of a block, whose indices have 6 bits."""
    indices = _indices_of_sixes(builder, block)
    look_up = emit.function(
        builder, "llvm.x86.avx512.permvar.qi.512", SIXTY_FOUR, SIXTY_FOUR, SIXTY_FOUR
    )
    third, second, first = (builder.call(look_up, [table, indices]) for table in palette)
    nothing = ir.Constant(SIXTY_FOUR, [0] * 64)
    vectors = []
    for eight in (0, 8):  # nothing crosses a lane of 16 bytes
        ats = [16 * lane + eight + n for lane in range(4) for n in range(8)]
        words = [
            builder.bitcast(
                emit.shuffled(builder, low, high, [at + s for at in ats for s in (0, 64)]), WORDS
            )
            for low, high in ((nothing, third), (second, first))
        ]
        for four in (0, 4):
            ats = [8 * lane + four + n for lane in range(4) for n in range(4)]
            pairs = [at + half for at in ats for half in (0, 32)]
            vectors.append(
                builder.bitcast(emit.shuffled(builder, words[0], words[1], pairs), FLOATS)
            )
    return [vectors[:2], vectors[2:]]


def rows_of_floats(
    builder: ir.IRBuilder, form: Form, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value,
) -> list[list[ir.Value]]:  # fmt: skip
    """The weights `k .. k + BLOCK` of `ROWS` rows, as vectors in order."""
    if form is not Form.SIXES:
        return [_floats(builder, form, weights, scales, palette, k, row) for row in range(ROWS)]
    block = builder.add(weights, builder.mul(k, emit.number(form.bytes_of(ROWS * BLOCK) // BLOCK)))
    pair = emit.number(form.bytes_of(2 * BLOCK))
    return _sixes(builder, block, palette) + _sixes(builder, builder.add(block, pair), palette)


def _floats(
    builder: ir.IRBuilder, form: Form, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value, row: int,
) -> list[ir.Value]:  # fmt: skip
    """The weights `k .. k + BLOCK` of one of `ROWS` rows as vectors, in order."""
    vectors = []
    block = builder.add(weights, builder.mul(k, emit.number(form.bytes_of(ROWS * BLOCK) // BLOCK)))
    block = builder.add(block, emit.number(row * form.bytes_of(BLOCK)))
    if form is Form.NIBBLES:
        for at in range(0, BLOCK // 2, LANES):
            pairs = builder.zext(
                emit.vector(builder, builder.add(block, emit.number(at)), BYTES), INTS
            )
            upper = builder.lshr(pairs, ir.Constant(INTS, [4] * LANES))
            vectors += [_looked_up(builder, palette, indices) for indices in (pairs, upper)]
        return vectors
    for at in range(0, BLOCK, LANES):
        address = builder.add(block, emit.number(form.bytes_of(at)))
        if form is Form.FLOATS:
            vectors.append(emit.vector(builder, address, FLOATS))
        elif form is Form.HALVES:
            vectors.append(builder.fpext(emit.vector(builder, address, HALVES), FLOATS))
        else:
            narrow = emit.vector(builder, address, BYTES)
            vectors.append(builder.sitofp(builder.sext(narrow, INTS), FLOATS))
    if form is Form.SCALED_BYTES:  # 4 bytes for each of `ROWS` rows and of 32 columns
        address = builder.add(scales, builder.lshr(k, emit.number(1)))
        address = builder.add(address, emit.number(4 * row))
        scale = emit.alike(builder, builder.load(emit.pointer(builder, address, F32), align=1))
        vectors = [builder.fmul(vector, scale) for vector in vectors]
    return vectors


def _fetch_ahead(builder: ir.IRBuilder, form: Form, weights: ir.Value, k: ir.Value) -> None:
    """Ask for the weights that come `AHEAD` bytes later: the processor's own guess ends at every
    page."""
    size = form.bytes_of(ROWS * BLOCK)
    start = builder.add(weights, builder.mul(k, emit.number(size // BLOCK)))
    kinds = (I8.as_pointer(), I32, I32, I32)
    prefetch = emit.function(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
    for at in range(0, size, 64):
        address = emit.pointer(builder, builder.add(start, emit.number(AHEAD + at)), I8)
        builder.call(prefetch, [address, *(ir.Constant(I32, n) for n in (0, 3, 1))])


def palette_vectors(builder: ir.IRBuilder, form: Form, address: ir.Value) -> list[ir.Value]:
    """The table of a palette; nothing for other forms."""
    if form is Form.SIXES:
        return [
            emit.vector(builder, builder.add(address, emit.number(at)), SIXTY_FOUR)
            for at in (0, 64, 128)
        ]
    if form is not Form.NIBBLES:
        return []
    starts = range(0, 64, 4 * LANES)
    return [emit.vector(builder, builder.add(address, emit.number(at)), FLOATS) for at in starts]


def folded(
    builder: ir.IRBuilder, vectors: list[ir.Value], add: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """The sums of four vectors, as a vector of four: halves are added until one number is left.

    Vectors are put side by side in pairs, so that one addition serves two of them.
    """
    width = LANES  # of what is left of each vector
    while len(vectors) > 1:
        half, segments = width // 2, LANES // width
        parts = [
            [at + width * n + lane for at in (0, LANES) for n in range(segments)
             for lane in range(first, first + half)]
            for first in (0, half)
        ]  # fmt: skip
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            add(*(emit.shuffled(builder, one, two, lanes) for lanes in parts)) for one, two in pairs
        ]
        width = half
    (vector,) = vectors
    step = width
    while width > 1:
        width //= 2
        other = [lane ^ width for lane in range(LANES)]
        vector = add(vector, emit.shuffled(builder, vector, vector, other))
    return emit.shuffled(builder, vector, vector, [step * n for n in range(4)])


def product_of(form: Form, tokens: int) -> Maker:
    """A function that multiplies `ROWS` rows of weights with `tokens` rows of inputs.

    Its arguments, all int64: the address of the results, the floats from a token's results to the
    next token's; the same two for inputs; the addresses of the weights, of a scale for each row, of
    block scales, and of the palette; the number of columns, a multiple of `BLOCK`.
    """

    @intrinsic
    def product(
        typing: Any, y: Any, y_step: Any, x: Any, x_step: Any, w: Any, scale: Any, blocks: Any,
        palette: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if form not in READABLE:  # nor does any weight have it
                return context.get_dummy_value()
            y, y_step, x, x_step, w, scale, blocks, palette, columns = given
            four = emit.number(4)
            inputs_at = [
                builder.add(x, builder.mul(builder.mul(x_step, four), emit.number(t)))
                for t in range(tokens)
            ]
            entries = palette_vectors(builder, form, palette)
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            loop = emit.Blocks(builder, columns, [zero] * (ROWS * tokens))
            sums = list(loop.values)
            if tokens == 1 or form is not Form.FLOATS:  # others are in a cache
                _fetch_ahead(builder, form, w, loop.k)
            weights = rows_of_floats(builder, form, w, blocks, entries, loop.k)
            for part in range(BLOCK // LANES):
                offset = builder.shl(builder.add(loop.k, emit.number(part * LANES)), emit.number(2))
                for t in range(tokens):
                    input_ = emit.vector(builder, builder.add(inputs_at[t], offset), FLOATS)
                    for r in range(ROWS):
                        at = r * tokens + t
                        sums[at] = emit.multiply_add(builder, weights[r][part], input_, sums[at])
            loop.end(sums)
            factors = emit.vector(builder, scale, FOUR)
            for t in range(tokens):
                own = [sums[r * tokens + t] for r in range(ROWS)]
                step = builder.mul(builder.mul(y_step, four), emit.number(t))
                address = emit.pointer(builder, builder.add(y, step), FOUR)
                builder.store(
                    builder.fmul(folded(builder, own, builder.fadd), factors), address, align=4
                )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return product


def unpacking_of(form: Form) -> Maker:
    """A function that writes `ROWS` rows of weights as floats, which lie as blocks do, without
    the rows' scales.

    Its arguments, all int64: the addresses of the floats, of the weights, of block scales and of
    the palette; the number of columns.
    """

    @intrinsic
    def unpack(typing: Any, y: Any, w: Any, blocks: Any, palette: Any, columns: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if form not in READABLE:
                return context.get_dummy_value()
            y, w, blocks, palette, columns = given
            entries = palette_vectors(builder, form, palette)
            loop = emit.Blocks(builder, columns, [])
            rows = rows_of_floats(builder, form, w, blocks, entries, loop.k)
            vectors = [vector for row in rows for vector in row]
            start = builder.add(y, builder.mul(loop.k, emit.number(4 * ROWS)))
            for number, vector in enumerate(vectors):
                address = builder.add(start, emit.number(4 * LANES * number))
                builder.store(vector, emit.pointer(builder, address, FLOATS), align=1)
            loop.end([])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return unpack


WIDE_LANES = 8
"""float64 numbers in a vector."""


@intrinsic
def exact_sums(
    typing: Any, sums: Any, weights: Any, values: Any, step: Any, count: Any, rounder: Any
) -> Any:
    """Add to `ROWS` sums the products of weights and rows of values, each rounded to a multiple of
    the rounder's last bit.

    The addresses of the sums and weights, float64, and of the values, float32; the floats from a
    row of values to the next; their count, a multiple of `WIDE_LANES`; the number that rounds.
    """
    wide, narrow = ir.VectorType(ir.DoubleType(), WIDE_LANES), ir.VectorType(F32, WIDE_LANES)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        sums, weights, values, step, count, rounder = given
        nothing = ir.Constant(wide, ir.Undefined)
        one = builder.insert_element(nothing, rounder, ir.Constant(I32, 0))
        every = ir.Constant(ir.VectorType(I32, WIDE_LANES), [0] * WIDE_LANES)
        rounders = builder.shuffle_vector(one, nothing, every)
        fma = emit.function(builder, f"llvm.fma.v{WIDE_LANES}f64", wide, wide, wide, wide)
        rows = [builder.add(values, builder.mul(step, emit.number(4 * row))) for row in range(ROWS)]
        zero = ir.Constant(wide, [0.0] * WIDE_LANES)
        loop = emit.Blocks(builder, count, [zero] * ROWS, WIDE_LANES)
        factor = emit.vector(
            builder, builder.add(weights, builder.shl(loop.k, emit.number(3))), wide
        )
        totals = []
        for row, total in zip(rows, loop.values, strict=True):
            value = emit.vector(
                builder, builder.add(row, builder.shl(loop.k, emit.number(2))), narrow
            )
            term = builder.call(fma, [factor, builder.fpext(value, wide), rounders])
            totals.append(builder.fadd(total, builder.fsub(term, rounders)))
        loop.end(totals)
        for row, total in enumerate(totals):
            place = emit.pointer(builder, builder.add(sums, emit.number(8 * row)), ir.DoubleType())
            number = builder.load(place, align=8)
            for lane in range(WIDE_LANES):
                number = builder.fadd(
                    number, builder.extract_element(total, ir.Constant(I32, lane))
                )
            builder.store(number, place, align=8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float64), generate


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], I8.as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def power_of_two(typing: Any, exponent: Any) -> Any:
    """2 to a whole float32 from -126 to 127. numba's own integers have 64 bits, half as many in a
    vector."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        whole = builder.fptosi(given[0], I32)
        biased = builder.add(whole, ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), F32)

    return types.float32(types.float32), generate


@intrinsic
def count_up(typing: Any, address: Any) -> Any:
    """Add 1 to a number that threads share."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        place = emit.pointer(builder, given[0], I64)
        builder.atomic_rmw("add", place, emit.number(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def counted(typing: Any, address: Any) -> Any:
    """A number that threads share."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        return builder.load_atomic(emit.pointer(builder, given[0], I64), "seq_cst", 8)

    return types.int64(types.int64), generate
