"""Vector code for products with weights, written in LLVM's own language.

A product of a row of weights and a row of inputs adds `LANES` sums side by side. The order of its
additions depends on no other row. So a token has the same result alone and among others, bit for
bit. The vectors that numba itself makes promise no order.

A form of weights differs only in the way from its bytes to floats (`_floats`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.emit import BLOCK, BYTES, F32, FLOATS, HALVES, INTS, LANES, WIDE
from cetane.mil.fast.forms import FLOATING, PALETTE_BYTES, ROWS, WeightForm

AHEAD = 2048
"""Bytes by which a product's prefetch is ahead of its reads."""
FOUR = ir.VectorType(F32, ROWS)
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


def rows_of_floats(
    builder: ir.IRBuilder, form: WeightForm, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value,
) -> list[list[ir.Value]]:  # fmt: skip
    """The weights `k .. k + BLOCK` of `ROWS` rows, as vectors in order."""
    return [_floats(builder, form, weights, scales, palette, k, row) for row in range(ROWS)]


def _floats(
    builder: ir.IRBuilder, form: WeightForm, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value, row: int,
) -> list[ir.Value]:  # fmt: skip
    """The weights `k .. k + BLOCK` of one of `ROWS` rows as vectors, in order."""
    vectors = []
    block = builder.add(weights, builder.mul(k, emit.number(form.bytes_of(ROWS * BLOCK) // BLOCK)))
    block = builder.add(block, emit.number(row * form.bytes_of(BLOCK)))
    if form is WeightForm.NIBBLES:
        for at in range(0, BLOCK // 2, LANES):
            pairs = builder.zext(
                emit.vector(builder, builder.add(block, emit.number(at)), BYTES), INTS
            )
            upper = builder.lshr(pairs, ir.Constant(INTS, [4] * LANES))
            vectors += [_looked_up(builder, palette, indices) for indices in (pairs, upper)]
        return vectors
    for at in range(0, BLOCK, LANES):
        address = builder.add(block, emit.number(form.bytes_of(at)))
        if form is WeightForm.FLOATS:
            vectors.append(emit.vector(builder, address, FLOATS))
        elif form is WeightForm.HALVES:
            vectors.append(builder.fpext(emit.vector(builder, address, HALVES), FLOATS))
        else:
            narrow = emit.vector(builder, address, BYTES)
            vectors.append(builder.sitofp(builder.sext(narrow, INTS), FLOATS))
    if form is WeightForm.SCALED_BYTES:  # 4 bytes for each of `ROWS` rows and of 32 columns
        address = builder.add(scales, builder.lshr(k, emit.number(1)))
        address = builder.add(address, emit.number(4 * row))
        scale = emit.repeated(builder, builder.load(emit.pointer(builder, address, F32), align=1))
        vectors = [builder.fmul(vector, scale) for vector in vectors]
    return vectors


def _fetch_ahead(builder: ir.IRBuilder, form: WeightForm, weights: ir.Value, k: ir.Value) -> None:
    """Prefetch the weights that come `AHEAD` bytes later: the processor's own prefetch stops at the
    end of a page."""
    size = form.bytes_of(ROWS * BLOCK)
    start = builder.add(weights, builder.mul(k, emit.number(size // BLOCK)))
    emit.prefetch(builder, builder.add(start, emit.number(AHEAD)), size)


def palette_vectors(builder: ir.IRBuilder, form: WeightForm, address: ir.Value) -> list[ir.Value]:
    """The table of a palette; nothing for other forms."""
    if form is not WeightForm.NIBBLES:
        return []
    starts = range(0, PALETTE_BYTES, 4 * LANES)
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
    stride = width
    while width > 1:
        width //= 2
        other = [lane ^ width for lane in range(LANES)]
        vector = add(vector, emit.shuffled(builder, vector, vector, other))
    return emit.shuffled(builder, vector, vector, [stride * n for n in range(4)])


def product_of(form: WeightForm, tokens: int) -> Maker:
    """A function that multiplies `ROWS` rows of weights with `tokens` rows of inputs.

    Its arguments are int64:

    - `y`, the address of the results, and `y_stride`, the floats from a token to the next;
    - `x` and `x_stride`, the same for inputs;
    - `w`, `scale`, `blocks` and `palette`, the addresses of the weights, of a scale for each row,
      of the scales of blocks, and of the palette;
    - `columns`, the number of columns, a multiple of `BLOCK`.
    """

    @intrinsic
    def product(
        typing: Any, y: Any, y_stride: Any, x: Any, x_stride: Any, w: Any, scale: Any, blocks: Any,
        palette: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if form not in FLOATING:  # no weight of this form comes here
                return context.get_dummy_value()
            y, y_stride, x, x_stride, w, scale, blocks, palette, columns = given
            four = emit.number(4)
            inputs_at = [
                builder.add(x, builder.mul(builder.mul(x_stride, four), emit.number(t)))
                for t in range(tokens)
            ]
            entries = palette_vectors(builder, form, palette)
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            loop = emit.Blocks(builder, columns, [zero] * (ROWS * tokens))
            sums = list(loop.values)
            if tokens == 1 or form is not WeightForm.FLOATS:  # unpacked weights are in a cache
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
                place = builder.mul(builder.mul(y_stride, four), emit.number(t))
                address = emit.pointer(builder, builder.add(y, place), FOUR)
                builder.store(
                    builder.fmul(folded(builder, own, builder.fadd), factors), address, align=4
                )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return product


def unpacking_of(form: WeightForm) -> Maker:
    """A function that writes `ROWS` rows of weights as floats, which lie as blocks do, without
    the rows' scales.

    Its arguments, all int64: the addresses of the floats, of the weights, of block scales and of
    the palette; the number of columns.
    """

    @intrinsic
    def unpack(typing: Any, y: Any, w: Any, blocks: Any, palette: Any, columns: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
            if form not in FLOATING:
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
