"""What LLVM can do and numba cannot say: pointers, powers of two, counters that threads share."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cetane.mil.fast import emit
from cetane.mil.fast.emit import F32, I8, I32, I64


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
    """Add 1 to the int64 at an address, which threads share."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        place = emit.pointer(builder, given[0], I64)
        builder.atomic_rmw("add", place, emit.number(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def counted(typing: Any, address: Any) -> Any:
    """The int64 at an address, which threads share."""

    def generate(context: Any, builder: ir.IRBuilder, _: Any, given: Any) -> Any:
        return builder.load_atomic(emit.pointer(builder, given[0], I64), "seq_cst", 8)

    return types.int64(types.int64), generate
