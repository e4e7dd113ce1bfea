"""Helpers that write vector code in LLVM's intermediate language."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config

_GIVEN = config.CPU_FEATURES  # the target that numba's environment sets, if any
FEATURES = (
    llvm.get_host_cpu_features()
    if _GIVEN is None
    else {feature[1:]: feature[0] == "+" for feature in _GIVEN.split(",") if feature}
)
WIDE = bool(FEATURES.get("avx512f"))
LANES = 16 if WIDE else 8
"""Floats in a vector. Processors with shorter vectors take several."""
BLOCK = 32
"""Elements of a row that lie together. Rows are padded with zeros to a multiple of it."""

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, BYTES, INTS = (ir.VectorType(kind, LANES) for kind in (F32, I8, I32))
HALVES = ir.VectorType(ir.HalfType(), LANES)


def function(builder: ir.IRBuilder, name: str, result: ir.Type, *given: ir.Type) -> ir.Function:
    """One of LLVM's own functions, declared once in a module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, given), name)


def number(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def vector(builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType) -> ir.Value:
    return builder.load(pointer(builder, address, kind), align=1)


def repeated(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector whose lanes all hold one number of 32 bits."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(INTS, [0] * LANES))


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(function(builder, name, FLOATS, FLOATS, FLOATS, FLOATS), [a, b, c])


def shuffled(builder: ir.IRBuilder, one: ir.Value, two: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes of two vectors. The second's lanes are numbered after the first's."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def prefetch(builder: ir.IRBuilder, address: ir.Value, size: int) -> None:
    """Fetch so many bytes from an address into the caches, line by line."""
    kinds = (I8.as_pointer(), I32, I32, I32)
    fetch = function(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
    for at in range(0, size, 64):
        place = pointer(builder, builder.add(address, number(at)), I8)
        builder.call(fetch, [place, *(ir.Constant(I32, n) for n in (0, 3, 1))])


class Blocks:
    """A loop over the blocks of a row, with values that each pass changes.

    `k` is the first column of a block. `values` begin as `start`; `end` gives those of the next
    pass.
    """

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
        self.k.add_incoming(number(0), before)
        self.values = [builder.phi(value.type) for value in start]
        for phi, value in zip(self.values, start, strict=True):
            phi.add_incoming(value, before)

    def end(self, values: list[ir.Value]) -> None:
        """Close the loop; the builder goes on after it."""
        builder = self.builder
        following = builder.add(self.k, number(self.size))
        self.k.add_incoming(following, builder.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, builder.block)
        more = builder.icmp_signed("<", following, self.columns)
        builder.cbranch(more, self.loop, self.after)
        builder.position_at_end(self.after)
