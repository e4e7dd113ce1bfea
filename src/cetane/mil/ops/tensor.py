"""Tensors made from parameters, or selected by conditions."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("fill")
def fill(shape: list[int], value: float = 0.0) -> Tensor:
    return torch.full(shape, value)


@op("fill_like")
def fill_like(ref_tensor: Tensor, value: float = 0.0) -> Tensor:
    return torch.full(ref_tensor.shape, value)


@op("range_1d")
def range_1d(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


@op("one_hot")
def one_hot(
    indices: Tensor,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: float = 1,
    off_value: float = 0,
) -> Tensor:
    hit = indices.unsqueeze(-1) == torch.arange(one_hot_vector_size)
    return torch.where(hit, on_value, off_value).movedim(-1, axis)


@op("band_part")
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """Elements outside the band become zero. A negative bound keeps its whole triangle."""
    if lower >= 0:
        x = x.triu(-lower)
    return x.tril(upper) if upper >= 0 else x


@op("non_zero")
def non_zero(x: Tensor) -> Tensor:
    return x.nonzero()


@op("select")
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond, a, b)
