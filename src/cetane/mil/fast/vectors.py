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

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

from cetane.mil.fast.compiled import keep_by_code

keep_by_code()  # before any function is compiled: all compiled modules import this one
_GIVEN = config.CPU_FEATURES  # what numba compiles for, if its environment says so
_FEATURES = (
    llvm.get_host_cpu_features()
    if _GIVEN is None
    else {feature[1:]: feature[0] == "+" for feature in _GIVEN.split(",") if feature}
)
WIDE = bool(_FEATURES.get("avx512f"))
LANES = 16 if WIDE else 8
"""Floats in a vector. Processors with shorter vectors take several."""
BLOCK = 32
"""Elements of a row that lie together. Rows are padded with zeros to a multiple of it."""
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
    """Indices of 6 bits into a palette of 64 halves (see `weights.in_sixes`). The palette is 64
    lower bytes, then 64 upper ones."""

    def bytes_of(self, weights: int) -> int:
        """The bytes of so many weights; they are whole blocks."""
        bits = {Form.FLOATS: 32, Form.HALVES: 16, Form.NIBBLES: 4, Form.SIXES: 6}.get(self, 8)
        return weights * bits // 8


READABLE = {Form.FLOATS, Form.BYTES, Form.SCALED_BYTES, Form.HALVES}
"""The forms that this processor reads. The others need its instructions that look up."""
if _FEATURES.get("avx2"):
    READABLE.add(Form.NIBBLES)
if WIDE and _FEATURES.get("avx512vbmi"):
    READABLE.add(Form.SIXES)

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOATS, BYTES, INTS = (ir.VectorType(kind, LANES) for kind in (F32, I8, I32))
HALVES, FOUR = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(F32, ROWS)
SIXTY_FOUR = ir.VectorType(I8, 64)
Maker = Callable[..., Any]


def _function(builder: ir.IRBuilder, name: str, result: ir.Type, *given: ir.Type) -> ir.Function:
    """One of LLVM's own functions, declared once in a module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, given), name)


def _number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def _vector(builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType) -> ir.Value:
    return builder.load(_pointer(builder, address, kind), align=1)


def _alike(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of one number."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(INTS, [0] * LANES))


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(_function(builder, name, FLOATS, FLOATS, FLOATS, FLOATS), [a, b, c])


def _looked_up(builder: ir.IRBuilder, palette: list[ir.Value], indices: ir.Value) -> ir.Value:
    """Entries of a palette, whose 16 floats are in one or two vectors."""
    if WIDE:
        permute = _function(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, FLOATS, INTS)
        return builder.call(permute, [palette[0], indices])
    permute = _function(builder, "llvm.x86.avx2.permps", FLOATS, FLOATS, INTS)
    low, high = (builder.call(permute, [half, indices]) for half in palette)
    upper = builder.icmp_signed(
        "<",
        builder.shl(indices, ir.Constant(INTS, [28] * LANES)),
        ir.Constant(INTS, [0] * LANES),
    )
    return builder.select(upper, high, low)


def _sixes(
    builder: ir.IRBuilder, block: ir.Value, palette: list[ir.Value]
) -> list[list[ir.Value]]:
    """The weights of two rows of a block, whose indices have 6 bits."""
    size = Form.SIXES.bytes_of(2 * BLOCK)
    shown = ir.Constant(ir.VectorType(ir.IntType(1), 64), [int(at < size) for at in range(64)])
    kinds = (I8.as_pointer(), I32, shown.type, SIXTY_FOUR)
    load = _function(builder, "llvm.masked.load.v64i8.p0", SIXTY_FOUR, *kinds)
    nothing = ir.Constant(SIXTY_FOUR, [0] * 64)
    place = _pointer(builder, block, I8)
    packed = builder.call(load, [place, ir.Constant(I32, 1), shown, nothing])
    # Six bytes to every eight, then eight indices, a byte each. What two upper bits hold counts
    # for nothing.
    spread = [at // 8 * 6 + min(at % 8, 5) for at in range(64)]
    eights = _shuffled(builder, packed, nothing, spread)
    cut = _function(
        builder, "llvm.x86.avx512.pmultishift.qb.512", SIXTY_FOUR, SIXTY_FOUR, SIXTY_FOUR
    )
    shifts = ir.Constant(SIXTY_FOUR, [6 * (at % 8) for at in range(64)])
    indices = builder.call(cut, [shifts, eights])
    look_up = _function(
        builder, "llvm.x86.avx512.permvar.qi.512", SIXTY_FOUR, SIXTY_FOUR, SIXTY_FOUR
    )
    lower, upper = (builder.call(look_up, [half, indices]) for half in palette)
    rows = []
    for row in range(2):
        vectors = []
        for first in (0, 8):  # the order in which `in_sixes` puts eights: nothing crosses a lane
            ats = [32 * row + first + 16 * lane + n for lane in range(2) for n in range(8)]
            pairs = [at + half for at in ats for half in (0, 64)]
            halves = builder.bitcast(_shuffled(builder, lower, upper, pairs), HALVES)
            vectors.append(builder.fpext(halves, FLOATS))
        rows.append(vectors)
    return rows


def _rows_of_floats(
    builder: ir.IRBuilder, form: Form, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value,
) -> list[list[ir.Value]]:  # fmt: skip
    """The weights `k .. k + BLOCK` of `ROWS` rows, as vectors in order."""
    if form is not Form.SIXES:
        return [_floats(builder, form, weights, scales, palette, k, row) for row in range(ROWS)]
    block = builder.add(weights, builder.mul(k, _number(form.bytes_of(ROWS * BLOCK) // BLOCK)))
    pair = _number(form.bytes_of(2 * BLOCK))
    return _sixes(builder, block, palette) + _sixes(builder, builder.add(block, pair), palette)


def _floats(
    builder: ir.IRBuilder, form: Form, weights: ir.Value, scales: ir.Value,
    palette: list[ir.Value], k: ir.Value, row: int,
) -> list[ir.Value]:  # fmt: skip
    """The weights `k .. k + BLOCK` of one of `ROWS` rows as vectors, in order."""
    vectors = []
    block = builder.add(weights, builder.mul(k, _number(form.bytes_of(ROWS * BLOCK) // BLOCK)))
    block = builder.add(block, _number(row * form.bytes_of(BLOCK)))
    if form is Form.NIBBLES:
        for at in range(0, BLOCK // 2, LANES):
            pairs = builder.zext(_vector(builder, builder.add(block, _number(at)), BYTES), INTS)
            upper = builder.lshr(pairs, ir.Constant(INTS, [4] * LANES))
            vectors += [_looked_up(builder, palette, indices) for indices in (pairs, upper)]
        return vectors
    for at in range(0, BLOCK, LANES):
        address = builder.add(block, _number(form.bytes_of(at)))
        if form is Form.FLOATS:
            vectors.append(_vector(builder, address, FLOATS))
        elif form is Form.HALVES:
            vectors.append(builder.fpext(_vector(builder, address, HALVES), FLOATS))
        else:
            narrow = _vector(builder, address, BYTES)
            vectors.append(builder.sitofp(builder.sext(narrow, INTS), FLOATS))
    if form is Form.SCALED_BYTES:  # 4 bytes for each of `ROWS` rows and of 32 columns
        address = builder.add(scales, builder.lshr(k, _number(1)))
        address = builder.add(address, _number(4 * row))
        scale = _alike(builder, builder.load(_pointer(builder, address, F32), align=1))
        vectors = [builder.fmul(vector, scale) for vector in vectors]
    return vectors


def _fetch_ahead(builder: ir.IRBuilder, form: Form, weights: ir.Value, k: ir.Value) -> None:
    """Ask for the weights that come `AHEAD` bytes later: the processor's own guess ends at every
    page."""
    size = form.bytes_of(ROWS * BLOCK)
    start = builder.add(weights, builder.mul(k, _number(size // BLOCK)))
    kinds = (I8.as_pointer(), I32, I32, I32)
    prefetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
    for at in range(0, size, 64):
        address = _pointer(builder, builder.add(start, _number(AHEAD + at)), I8)
        builder.call(prefetch, [address, *(ir.Constant(I32, n) for n in (0, 3, 1))])


def _palette(builder: ir.IRBuilder, form: Form, address: ir.Value) -> list[ir.Value]:
    if form is Form.SIXES:
        return [_vector(builder, builder.add(address, _number(at)), SIXTY_FOUR) for at in (0, 64)]
    if form is not Form.NIBBLES:
        return []
    starts = range(0, 64, 4 * LANES)
    return [_vector(builder, builder.add(address, _number(at)), FLOATS) for at in starts]


def _sums(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
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
            builder.fadd(*(_shuffled(builder, one, two, lanes) for lanes in parts))
            for one, two in pairs
        ]
        width = half
    (vector,) = vectors
    step = width
    while width > 1:
        width //= 2
        other = [lane ^ width for lane in range(LANES)]
        vector = builder.fadd(vector, _shuffled(builder, vector, vector, other))
    return _shuffled(builder, vector, vector, [step * n for n in range(4)])


def _shuffled(builder: ir.IRBuilder, one: ir.Value, two: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes of two vectors; those of the second are counted on from the first's."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


class _Blocks:
    """A loop over the blocks of a row, with values that each turn changes."""

    def __init__(
        self, builder: ir.IRBuilder, columns: ir.Value, start: list[ir.Value], size: int = BLOCK
    ) -> None:
        self.builder, self.columns, self.size = builder, columns, size
        before = builder.block
        self.loop = builder.append_basic_block("blocks")
        self.after = builder.append_basic_block("after")
        builder.branch(self.loop)
        builder.position_at_end(self.loop)
        self.k = builder.phi(I64)
        self.k.add_incoming(_number(0), before)
        self.values = [builder.phi(value.type) for value in start]
        for phi, value in zip(self.values, start, strict=True):
            phi.add_incoming(value, before)

    def end(self, values: list[ir.Value]) -> None:
        """Close the loop; what follows comes after it."""
        builder = self.builder
        following = builder.add(self.k, _number(self.size))
        self.k.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        more = builder.icmp_signed("<", following, self.columns)
        builder.cbranch(more, self.loop, self.after)
        builder.position_at_end(self.after)


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
            four = _number(4)
            inputs_at = [
                builder.add(x, builder.mul(builder.mul(x_step, four), _number(t)))
                for t in range(tokens)
            ]
            entries = _palette(builder, form, palette)
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            loop = _Blocks(builder, columns, [zero] * (ROWS * tokens))
            sums = list(loop.values)
            if tokens == 1 or form is not Form.FLOATS:  # others are in a cache
                _fetch_ahead(builder, form, w, loop.k)
            weights = _rows_of_floats(builder, form, w, blocks, entries, loop.k)
            for part in range(BLOCK // LANES):
                offset = builder.shl(builder.add(loop.k, _number(part * LANES)), _number(2))
                for t in range(tokens):
                    input_ = _vector(builder, builder.add(inputs_at[t], offset), FLOATS)
                    for r in range(ROWS):
                        at = r * tokens + t
                        sums[at] = _multiply_add(builder, weights[r][part], input_, sums[at])
            loop.end(sums)
            factors = _vector(builder, scale, FOUR)
            for t in range(tokens):
                own = [sums[r * tokens + t] for r in range(ROWS)]
                step = builder.mul(builder.mul(y_step, four), _number(t))
                address = _pointer(builder, builder.add(y, step), FOUR)
                builder.store(builder.fmul(_sums(builder, own), factors), address, align=4)
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
            entries = _palette(builder, form, palette)
            loop = _Blocks(builder, columns, [])
            rows = _rows_of_floats(builder, form, w, blocks, entries, loop.k)
            vectors = [vector for row in rows for vector in row]
            start = builder.add(y, builder.mul(loop.k, _number(4 * ROWS)))
            for number, vector in enumerate(vectors):
                address = builder.add(start, _number(4 * LANES * number))
                builder.store(vector, _pointer(builder, address, FLOATS), align=1)
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
        fma = _function(builder, f"llvm.fma.v{WIDE_LANES}f64", wide, wide, wide, wide)
        rows = [builder.add(values, builder.mul(step, _number(4 * row))) for row in range(ROWS)]
        zero = ir.Constant(wide, [0.0] * WIDE_LANES)
        loop = _Blocks(builder, count, [zero] * ROWS, WIDE_LANES)
        factor = _vector(builder, builder.add(weights, builder.shl(loop.k, _number(3))), wide)
        totals = []
        for row, total in zip(rows, loop.values, strict=True):
            value = _vector(builder, builder.add(row, builder.shl(loop.k, _number(2))), narrow)
            term = builder.call(fma, [factor, builder.fpext(value, wide), rounders])
            totals.append(builder.fadd(total, builder.fsub(term, rounders)))
        loop.end(totals)
        for row, total in enumerate(totals):
            place = _pointer(builder, builder.add(sums, _number(8 * row)), ir.DoubleType())
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
        place = _pointer(builder, given[0], I64)
        builder.atomic_rmw("add", place, _number(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def counted(typing: Any, address: Any) -> Any:
    """A number that threads share."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        return builder.load_atomic(_pointer(builder, given[0], I64), "seq_cst", 8)

    return types.int64(types.int64), generate
