"""Decoding of compressed constants.

iOS 16 packs indices and masks into bytes and gives the shape beside them; iOS 18 types them as
narrow integers in the shape of the result.
"""

import math

import torch
from torch import Tensor

from cetane.mil.dtypes import unpack
from cetane.mil.ops.elementwise import along_axis
from cetane.mil.ops.registry import op


@op("constexpr_cast", ignores=("output_dtype",))
def constexpr_cast(source_val: Tensor) -> Tensor:
    return source_val


@op("constexpr_affine_dequantize")
def constexpr_affine_dequantize(
    quantized_data: Tensor, zero_point: Tensor, scale: Tensor, axis: int
) -> Tensor:
    steps = quantized_data.to(scale.dtype) - along_axis(zero_point, quantized_data, axis)
    return steps * along_axis(scale, quantized_data, axis)


@op("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(
    data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> Tensor:
    """One scale, and offset, per block; a block is data.shape / scale.shape elements."""
    steps = data.to(scale.dtype)
    if offset is not None:
        steps = steps - _per_element(offset, data.shape)
    return steps * _per_element(scale, data.shape)


@op("constexpr_lut_to_dense")
def constexpr_lut_to_dense(
    indices: Tensor, lut: Tensor, shape: list[int] | None = None, vector_axis: int | None = None
) -> Tensor:
    """`lut` is (entries,) for iOS 16, else (*groups, entries, vector length)."""
    if shape is None:
        return _look_up(indices, lut, vector_axis)
    unpacked = _unpack(indices, int(math.log2(len(lut))), shape)
    return lut[unpacked.int()]


@op("constexpr_sparse_to_dense")
def constexpr_sparse_to_dense(
    nonzero_data: Tensor, mask: Tensor, shape: list[int] | None = None
) -> Tensor:
    return _fill_in(nonzero_data, mask if shape is None else _unpack(mask, 1, shape))


@op("constexpr_lut_to_sparse")
def constexpr_lut_to_sparse(
    indices_mask: Tensor,
    indices_nonzero_data: Tensor,
    lut: Tensor,
    vector_axis: int | None = None,
) -> tuple[Tensor, Tensor]:
    dense = _look_up(_fill_in(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = indices_mask
    if vector_axis is not None:
        mask = mask.repeat_interleave(lut.shape[-1], vector_axis)
    return mask, dense[mask.bool()]


@op("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(
    data_mask: Tensor, nonzero_data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dense = constexpr_blockwise_shift_scale(_fill_in(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask.bool()]


def _look_up(indices: Tensor, lut: Tensor, vector_axis: int | None) -> Tensor:
    *groups, entries, length = lut.shape
    if length == 1 and groups[0] == math.prod(groups):
        # The usual form, without a number of 32 bits for every element.
        dense = torch.empty(indices.shape, dtype=lut.dtype).reshape(groups[0], -1)
        tables = lut.reshape(groups[0], entries)
        for part, table, out in zip(indices.reshape(groups[0], -1), tables, dense, strict=True):
            torch.index_select(table, 0, part.int(), out=out)
        return dense.reshape(indices.shape)
    # The number of each element's group; an axis with a single group is left to broadcasting.
    group = torch.zeros([1] * indices.ndim, dtype=torch.int32)
    for axis, (size, count) in enumerate(zip(indices.shape, groups, strict=True)):
        if count > 1:
            position = torch.arange(count, dtype=torch.int32).repeat_interleave(size // count)
            group = group * count + along_axis(position, indices, axis)
    rows = (group * entries + indices).reshape(-1)
    found = lut.reshape(-1, length).index_select(0, rows).reshape(*indices.shape, length)
    axis = -1 if vector_axis is None else vector_axis
    axis %= indices.ndim
    return found.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _per_element(blocks: Tensor, shape: torch.Size) -> Tensor:
    for axis, size in enumerate(shape):
        if blocks.shape[axis] != 1:  # the others broadcast
            blocks = blocks.repeat_interleave(size // blocks.shape[axis], axis)
    return blocks


def _fill_in(nonzero: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=nonzero.dtype).masked_scatter(mask.bool(), nonzero)


def _unpack(packed: Tensor, bits: int, shape: list[int]) -> Tensor:
    return torch.from_numpy(unpack(packed.numpy(), bits, math.prod(shape))).reshape(shape)
