"""Ops that move elements without changing them."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import Tensors, op
from cetane.mil.shapes import with_kept


@op("identity")
def identity(x: Tensor) -> Tensor:
    return x


@op("shape")
def shape(x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int32)


@op("reshape")
def reshape(x: Tensor, shape: list[int]) -> Tensor:
    """-1 takes the remaining elements; `with_kept` tells of 0."""
    return x.reshape(with_kept(shape, x.shape))


@op("reshape_like")
def reshape_like(
    x: Tensor, ref_tensors: Tensors, begins: Tensors, ends: Tensors, end_masks: Tensors
) -> Tensor:
    shape: list[int] = []
    for reference, begin, end, to_the_end in zip(ref_tensors, begins, ends, end_masks, strict=True):
        shape += reference.shape[int(begin) : None if to_the_end else int(end)]
    return x.reshape(shape)


@op("expand_dims")
def expand_dims(x: Tensor, axes: list[int]) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@op("squeeze")
def squeeze(x: Tensor, axes: list[int] | None = None) -> Tensor:
    """Only axes of size 1 are removed."""
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@op("flatten2d")
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(x.shape[:axis].numel(), -1)


@op("transpose")
def transpose(x: Tensor, perm: list[int]) -> Tensor:
    return x.permute(perm)


@op("reverse")
def reverse(x: Tensor, axes: list[int] | None = None) -> Tensor:
    return x.flip(list(range(x.ndim)) if axes is None else axes)


@op("tile")
def tile(x: Tensor, reps: list[int]) -> Tensor:
    return x.tile(reps)


@op("concat")
def concat(values: Tensors, axis: int, interleave: bool = False) -> Tensor:
    if interleave:
        axis %= values[0].ndim
        return torch.stack(values, axis + 1).flatten(axis, axis + 1)
    return torch.cat([value if value.ndim else value[None] for value in values], axis)


@op("stack")
def stack(values: Tensors, axis: int) -> Tensor:
    return torch.stack(values, axis)


@op("split")
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: list[int] | None = None
) -> tuple[Tensor, ...]:
    if split_sizes is not None:
        return torch.split_with_sizes(x, split_sizes, axis)
    if num_splits is None or x.shape[axis] % num_splits:
        raise ValueError(f"cannot split {x.shape[axis]} elements into {num_splits} equal parts")
    return x.tensor_split(num_splits, axis)


@op("sliding_windows")
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    axis %= x.ndim
    return x.unfold(axis, size, stride).movedim(-1, axis + 1)


@op("reverse_sequence")
def reverse_sequence(
    x: Tensor, lengths: list[int], seq_axis: int = 0, batch_axis: int = 0
) -> Tensor:
    """Reverses the first `lengths[i]` elements of row i."""
    rows = x.movedim((batch_axis, seq_axis), (0, 1)).clone()
    for row, length in enumerate(lengths):
        rows[row, :length] = rows[row, :length].flip(0)
    return rows.movedim((0, 1), (batch_axis, seq_axis))
