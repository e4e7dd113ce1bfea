"""Constants in numpy: the decoding of compressed ones, and moves of their elements.

iOS 16 packs indices and masks into bytes and gives the shape beside them; iOS 18 types them as
narrow integers in the shape of the result. The reference executor decodes with these functions too.
Floats are float32 here; whoever calls rounds a result to its declared type.
"""

import math

import numpy as np

from cetane.mil.dtypes import Array, unpack
from cetane.mil.implementation import Implementations
from cetane.mil.shapes import with_kept

Arrays = list[Array]


def _passing(annotation: object) -> str:
    if annotation == Arrays:
        return "tensors"
    return "tensor" if annotation in (Array, Array | None) else "plain"


DECODERS = Implementations(_passing)
"""The `constexpr_*` ops."""
MOVES = Implementations(_passing)
"""The ops that move elements, which rewrites apply to weights."""


@DECODERS.enters("constexpr_cast", ignores=("output_dtype",))
def constexpr_cast(source_val: Array) -> Array:
    return source_val


@DECODERS.enters("constexpr_affine_dequantize")
def constexpr_affine_dequantize(
    quantized_data: Array, zero_point: Array, scale: Array, axis: int
) -> Array:
    steps = quantized_data.astype(np.float32) - _along(zero_point, quantized_data, axis)
    return steps * _along(scale, quantized_data, axis)


@DECODERS.enters("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(
    data: Array, scale: Array, offset: Array | None = None
) -> Array:
    """One scale and offset for each block of data.shape / scale.shape elements."""
    steps = data.astype(np.float32)
    if offset is not None:
        steps -= _per_element(offset, data.shape)
    steps *= _per_element(scale, data.shape)
    return steps


@DECODERS.enters("constexpr_lut_to_dense")
def constexpr_lut_to_dense(
    indices: Array, lut: Array, shape: list[int] | None = None, vector_axis: int | None = None
) -> Array:
    """`lut` is (entries,) for iOS 16, else (*groups, entries, vector length)."""
    if shape is None:
        return _look_up(indices, lut, vector_axis)
    return lut[_unpack(indices, int(math.log2(len(lut))), shape)]


@DECODERS.enters("constexpr_sparse_to_dense")
def constexpr_sparse_to_dense(
    nonzero_data: Array, mask: Array, shape: list[int] | None = None
) -> Array:
    return _fill_in(nonzero_data, mask if shape is None else _unpack(mask, 1, shape))


@DECODERS.enters("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(
    indices_mask: Array, indices_nonzero_data: Array, lut: Array, vector_axis: int | None = None
) -> tuple[Array, Array]:
    dense = _look_up(_fill_in(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = indices_mask
    if vector_axis is not None:
        mask = np.repeat(mask, lut.shape[-1], vector_axis)
    return mask, dense[mask.astype(bool)]


@DECODERS.enters("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(
    data_mask: Array, nonzero_data: Array, scale: Array, offset: Array | None = None
) -> tuple[Array, Array]:
    dense = constexpr_blockwise_shift_scale(_fill_in(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask.astype(bool)]


@MOVES.enters("reshape")
def reshape(x: Array, shape: list[int]) -> Array:
    return x.reshape(with_kept(shape, x.shape))


@MOVES.enters("transpose")
def transpose(x: Array, perm: list[int]) -> Array:
    return x.transpose(perm)


@MOVES.enters("concat")
def concat(values: Arrays, axis: int, interleave: bool = False) -> Array:
    if interleave:
        axis %= values[0].ndim
        shape = list(values[0].shape)
        shape[axis] *= len(values)
        return np.stack(values, axis + 1).reshape(shape)
    return np.concatenate([np.atleast_1d(value) for value in values], axis)


def _look_up(indices: Array, lut: Array, vector_axis: int | None) -> Array:
    """The entries of `lut (*groups, entries, length)` at the indices; an entry lies along
    `vector_axis`."""
    *groups, entries, length = lut.shape
    if indices.dtype.kind != "u":
        raise ValueError("indices of a palette are unsigned")
    if length == 1 and groups[0] == math.prod(groups):
        # The usual form: one table for the rows of a group.
        tables, rows = lut.reshape(groups[0], entries), indices.reshape(groups[0], -1)
        dense = np.empty(rows.shape, lut.dtype)
        for table, row, out in zip(tables, rows, dense, strict=True):
            out[:] = table[row]
        return dense.reshape(indices.shape)
    if indices.size and int(indices.max()) >= entries:  # it would read the next group's palette
        raise IndexError(f"index {int(indices.max())} of a palette of {entries} entries")
    # The group number of each element; an axis with a single group broadcasts.
    group = np.zeros([1] * indices.ndim, np.int64)
    for axis, (size, count) in enumerate(zip(indices.shape, groups, strict=True)):
        if count > 1:
            position = np.repeat(np.arange(count), size // count)
            group = group * count + _along(position, indices, axis)
    rows = (group * entries + indices).reshape(-1)
    vectors = lut.reshape(-1, length)[rows].reshape(*indices.shape, length)
    axis = (-1 if vector_axis is None else vector_axis) % indices.ndim
    shape = list(indices.shape)
    shape[axis] *= length
    return np.moveaxis(vectors, -1, axis + 1).reshape(shape)


def _along(vector: Array, x: Array, axis: int) -> Array:
    """A vector shaped to broadcast along one axis of `x`; a scalar stays as it is."""
    if vector.ndim == 0:
        return vector
    shape = [1] * x.ndim
    shape[axis] = -1
    return vector.reshape(shape)


def _per_element(blocks: Array, shape: tuple[int, ...]) -> Array:
    """One number for each block of a tensor, repeated for its elements; sizes of 1 broadcast."""
    for axis, size in enumerate(shape):
        if blocks.shape[axis] != 1:  # the others broadcast
            blocks = np.repeat(blocks, size // blocks.shape[axis], axis)
    return blocks


def _fill_in(nonzero: Array, mask: Array) -> Array:
    """An array of the mask's shape: `nonzero` in order where the mask is 1, zeros elsewhere."""
    dense = np.zeros(mask.shape, nonzero.dtype)
    kept = mask.astype(bool)
    if int(kept.sum()) > nonzero.size:
        raise ValueError(f"the mask keeps {int(kept.sum())} elements, there are {nonzero.size}")
    dense[kept] = nonzero.reshape(-1)[: int(kept.sum())]
    return dense


def _unpack(packed: Array, bits: int, shape: list[int]) -> Array:
    return unpack(packed.view(np.uint8).reshape(-1), bits, math.prod(shape)).reshape(shape)
