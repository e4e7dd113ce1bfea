"""Shape rules of compressed constants."""

import math

from cetane.mil.shapes.rules import KnownOp, Shape, Shapes, axis_of, bounded, rule

LONG_ENTRY = 8
"""Weights of a palette's entry. With more, a small file could decode to any size."""


@rule("constexpr_cast")
def _constexpr_cast(given: KnownOp) -> Shapes:
    return [given.shape("source_val")]


@rule("constexpr_affine_dequantize")
def _affine(given: KnownOp) -> Shapes:
    data, scale = given.shape("quantized_data"), given.shape("scale")
    axis = axis_of(given.value("axis"), len(data))
    for shape in (scale, given.shape("zero_point")):
        if shape not in ((), (1,), (data[axis],)):
            raise ValueError(f"scales of {shape} do not fit {data} along axis {axis}")
    return [data]


@rule("constexpr_blockwise_shift_scale")
def _blockwise(given: KnownOp) -> Shapes:
    data = given.shape("data")
    for name in ("scale", "offset") if "offset" in given.op.inputs else ("scale",):
        blocks = given.shape(name)
        fits = len(blocks) == len(data) and all(
            0 < count <= max(size, 1) for count, size in zip(blocks, data, strict=True)
        )
        if not fits:
            raise ValueError(f"a {name} of {blocks} does not fit {data}")
    return [data]


@rule("constexpr_lut_to_dense")
def _lut_to_dense(given: KnownOp) -> Shapes:
    indices, lut = given.shape("indices"), given.shape("lut")
    if "shape" in given.op.inputs:
        sizes, entries = tuple(given.values("shape")), math.prod(lut)
        if entries < 2 or entries & (entries - 1):
            raise ValueError(f"a palette of {entries} entries has no indices of whole bits")
        _fits_packed(given, "indices", sizes, entries.bit_length() - 1)
        return [sizes]
    return [_looked_up(given, indices, lut)]


@rule("constexpr_lut_to_sparse")
def _lut_to_sparse(given: KnownOp) -> Shapes:
    """How many values the mask keeps, no shape says."""
    _looked_up(given, given.shape("indices_mask"), given.shape("lut"))
    return None


def _looked_up(given: KnownOp, indices: Shape, lut: Shape) -> Shape:
    """The shape of a palette's entries at some indices. Raises ValueError for shapes that do not
    fit, and for a large result of few indices with long entries."""
    if len(lut) != len(indices) + 2:
        raise ValueError(f"a palette of {lut} does not fit indices of {indices}")
    for count, size in zip(lut, indices, strict=False):
        if count < 1 or size % count:
            raise ValueError(f"a palette of {lut} does not fit indices of {indices}")
    if lut[-1] == 1:
        return indices
    axis = axis_of(given.value("vector_axis", -1), len(indices))
    shape = (*indices[:axis], indices[axis] * lut[-1], *indices[axis + 1 :])
    if lut[-1] > LONG_ENTRY:
        bounded(shape)
    return shape


@rule("constexpr_sparse_to_dense")
def _sparse_to_dense(given: KnownOp) -> Shapes:
    if "shape" in given.op.inputs:
        sizes = tuple(given.values("shape"))
        _fits_packed(given, "mask", sizes, 1)
        return [sizes]
    return [given.shape("mask")]


def _fits_packed(given: KnownOp, name: str, sizes: Shape, bits: int) -> None:
    """Raise ValueError if packed bytes do not hold the elements of a shape."""
    if any(size < 0 for size in sizes):
        raise ValueError(f"the shape {sizes} has a negative size")
    needed, there = -(-math.prod(sizes) * bits // 8), math.prod(given.shape(name))
    if needed > there:
        raise ValueError(f"{sizes} of {bits} bits need {needed} bytes, {name} has {there}")
