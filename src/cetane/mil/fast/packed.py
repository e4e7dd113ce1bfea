"""Packed weights: integers of a few bits, in the form that onnxruntime's MatMulNBits takes.

That kernel rounds activations to 8 bits, one scale for every 32 of them, as llama.cpp does. Core
ML's linear weights fit it without loss:

    weight = scale * (data - offset), one scale and offset per output channel, or per block of
    inputs

Palettes do not fit: their values are not multiples of one scale. They are rounded as activations
are, to 8 bits with one scale for 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from onnx import TensorProto

from cetane.mil.constants import Constants
from cetane.mil.dtypes import Array
from cetane.mil.fast.model import model
from cetane.mil.fast.onnx_graph import MICROSOFT, OnnxGraph, OnnxWeight, Tensor
from cetane.mil.fast.sessions import open_session
from cetane.mil.program import Op, StoredConstant

BLOCK = 32
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
_LINEAR, _PALETTE = "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"


def bits_of(constants: Constants, weight: str | StoredConstant) -> int | None:
    """The bits of an element, if this weight `(N, K, ...)` can stay packed; else None. Reads no
    weight."""
    op = constants.producer(weight)
    if op is not None and op.kind == "concat":
        widths = {bits_of(constants, part) for part in op.inputs["values"]}
        return widths.pop() if len(widths) == 1 else None
    if op is not None and op.kind == _PALETTE:
        return 8
    if op is None or op.kind != _LINEAR:
        return None
    data, scale = (constants.type(op.inputs[name][0]) for name in ("data", "scale"))
    offset = constants.type(op.inputs["offset"][0]).dtype if "offset" in op.inputs else data.dtype
    columns, blocks = data.shape[1], scale.shape[1]
    assert isinstance(columns, int) and isinstance(blocks, int)
    fits = offset == data.dtype and (blocks == 1 or columns // blocks % BLOCK == 0)
    return _BITS.get(data.dtype) if fits else None


@dataclass(frozen=True)
class Elements:
    """A weight as `scale * (data - zero)`.

    `data` is unsigned, (N, blocks, BLOCK); `scale`, fp32, and `zero` are (N, blocks). The last
    block may be padded.
    """

    data: Array
    scale: Array
    zero: Array

    @classmethod
    def read(cls, constants: Constants, weight: str | StoredConstant) -> Elements:
        op = constants.producer(weight)
        assert op is not None
        if op.kind == "concat":
            parts = [cls.read(constants, part) for part in op.inputs["values"]]
            names = ("data", "scale", "zero")
            return cls(*(np.concatenate([getattr(part, n) for part in parts]) for n in names))
        if op.kind == _PALETTE:
            return cls._rounded(constants.array(weight))
        return cls._linear(constants, op)

    @classmethod
    def _rounded(cls, weight: Array) -> Elements:
        """A weight `(N, K, ...)` in 8 bits, symmetric, with a scale for each block."""
        blocks = _in_blocks(weight)
        scale = np.abs(blocks).max(-1) / np.float32(127)
        steps = np.rint(blocks / np.where(scale > 0, scale, 1)[..., None])
        return cls((steps + 128).astype(np.uint8), scale, np.full(scale.shape, 128, np.uint8))

    @classmethod
    def _linear(cls, constants: Constants, op: Op) -> Elements:
        """A linear weight, without loss."""
        dtype = constants.type(op.inputs["data"][0]).dtype
        above = 1 << _BITS[dtype] - 1 if dtype.startswith("int") else 0  # makes integers unsigned

        def unsigned(name: str) -> Array:
            return (constants.array(op.inputs[name][0]).astype(np.int16) + above).astype(np.uint8)

        data = _in_blocks(unsigned("data"))
        rows, blocks, _ = data.shape

        def per_block(values: Array) -> Array:
            values = values.reshape(len(values), -1)
            wide = np.repeat(values, blocks // values.shape[1], axis=1)
            return np.ascontiguousarray(np.broadcast_to(wide, (rows, blocks)))

        scale = constants.array(op.inputs["scale"][0]).astype(np.float32)
        zero = (
            unsigned("offset") if "offset" in op.inputs else np.full(scale.shape, above, np.uint8)
        )
        return cls(data, per_block(scale), per_block(zero))

    def in_nibbles(self) -> Elements:
        """8 bits as two planes of 4 bits: a matrix for an input that is repeated."""
        return Elements(
            np.concatenate([self.data >> 4, self.data & 15], axis=1),
            np.concatenate([16 * self.scale, self.scale], axis=1),
            np.concatenate([self.zero >> 4, self.zero & 15], axis=1),
        )


def _in_blocks(weight: Array) -> Array:
    """A weight `(N, K, ...)` as (N, blocks, BLOCK), padded with zeros."""
    rows, columns, *_ = weight.shape
    filled = np.pad(weight.reshape(rows, columns), ((0, 0), (0, -columns % BLOCK)))
    return filled.reshape(rows, -1, BLOCK)


class Packed:
    """A packed matrix of `rows` output channels and `columns` inputs, which multiplies rows."""

    def __init__(self, constants: Constants, weight: str | StoredConstant) -> None:
        shape, bits = constants.type(weight).static_shape, bits_of(constants, weight)
        assert shape is not None and bits is not None
        self.rows, self.columns, *_ = shape
        self.split = bits == 8 and not has_exact_8_bits()
        self.bits = 4 if self.split else bits
        self._constants, self._weight = constants, weight
        self._read: dict[str, Array] = {}

    def multiply(self, g: OnnxGraph, x: Tensor) -> str:
        """The product of `x (..., K)` with the matrix, `(..., N)`."""
        blocks = -(-self.columns // BLOCK)
        given: Tensor | str = x
        if self.split:
            missing = blocks * BLOCK - self.columns
            if missing:
                given = g("Pad", given, g.ints([0] * (2 * x.rank - 1) + [missing]))
            given = g("Concat", given, given, axis=-1)
            blocks *= 2
        columns = blocks * BLOCK if self.split else self.columns
        per_row = (blocks * self.bits + 7) // 8
        shapes = {
            "data": (self.rows, blocks, BLOCK * self.bits // 8),
            "scale": (self.rows * blocks,),
            "zero": (self.rows * per_row,),
        }
        tensors = [self._weight_of(g, name, shape) for name, shape in shapes.items()]
        return _product(g, given, tensors, self.rows, columns, self.bits)

    def _weight_of(self, g: OnnxGraph, name: str, shape: tuple[int, ...]) -> str:
        key = ("packed", name, self.bits, self._constants.key(self._weight))
        element = TensorProto.FLOAT if name == "scale" else TensorProto.UINT8
        return g.weight(OnnxWeight(key, shape, element, lambda: self._array(name).reshape(shape)))

    def _array(self, name: str) -> Array:
        """One of the three arrays. They are read together, and freed one by one."""
        if name not in self._read:
            elements = Elements.read(self._constants, self._weight)
            elements = elements.in_nibbles() if self.split else elements
            self._read = {
                "data": in_bytes(elements.data, self.bits),
                "scale": elements.scale,
                "zero": in_bytes(elements.zero, self.bits),
            }
        return self._read.pop(name)


def in_bytes(elements: Array, bits: int) -> Array:
    """Unsigned elements of 8 or 4 bits as bytes; of two in a byte, the first is the lower half.

    A row fills a whole number of bytes.
    """
    if bits == 8:
        return elements
    if elements.shape[-1] % 2:
        elements = np.pad(elements, [(0, 0)] * (elements.ndim - 1) + [(0, 1)])
    return elements[..., ::2] | elements[..., 1::2] << 4


@cache
def has_exact_8_bits() -> bool:
    """Whether the kernel for 8 bits computes right on this processor.

    Without VNNI instructions it may add pairs of products in 16 bits, and these may saturate.
    Products of 4-bit weights never do.
    """
    g = OnnxGraph({"x": Tensor("x", (1, BLOCK), "fp32")})
    most = np.full((1, 1, BLOCK), 255, np.uint8), np.ones(1, np.float32), np.zeros(1, np.uint8)
    g.outputs["y"] = _product(g, "x", [g.literal(array) for array in most], 1, BLOCK, 8)
    (result,) = open_session(model([g]).SerializeToString()).run(
        None, {"x": np.ones((1, BLOCK), np.float32)}
    )
    return bool(np.isclose(result[0, 0], 255 * BLOCK))


def _product(
    g: OnnxGraph, x: Tensor | str, weight: Sequence[str], rows: int, columns: int, bits: int
) -> str:
    """The product of `x`, rounded to 8 bits, with a matrix of data, scales and zero points."""
    sizes = {"N": rows, "K": columns, "bits": bits, "block_size": BLOCK}
    return g("MatMulNBits", x, *weight, domain=MICROSOFT, accuracy_level=4, **sizes)
