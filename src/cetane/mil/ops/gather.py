"""Reading and writing at computed positions. Negative indices count from the end."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("gather", ignores=("validate_indices",))
def gather(x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0) -> Tensor:
    axis %= x.ndim
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        return torch.stack([gather(one, at, axis - 1, batch_dims - 1) for one, at in pairs])
    taken = x.index_select(axis, _from_start(indices, x.shape[axis]).reshape(-1))
    return taken.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@op("gather_along_axis", ignores=("validate_indices",))
def gather_along_axis(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    return x.take_along_dim(_from_start(indices, x.shape[axis]), axis)


@op("gather_nd", ignores=("validate_indices",))
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        return torch.stack([gather_nd(one, at, batch_dims - 1) for one, at in pairs])
    return x[tuple(indices.long().unbind(-1))]


@op("scatter", ignores=("validate_indices",))
def scatter(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> Tensor:
    shape = [1] * data.ndim
    shape[axis] = -1
    along = indices.reshape(shape).expand(updates.shape)
    return scatter_along_axis(data, along, updates, axis, mode)


@op("scatter_along_axis", ignores=("validate_indices",))
def scatter_along_axis(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> Tensor:
    at = _from_start(indices, data.shape[axis])
    match mode:
        case "update":
            return data.scatter(axis, at, updates)
        case "add":
            return data.scatter_add(axis, at, updates)
        case "sub":
            return data.scatter_add(axis, at, -updates)
        case "mul":
            return data.scatter_reduce(axis, at, updates, "prod")
        case "div":
            return data / torch.ones_like(data).scatter_reduce(axis, at, updates, "prod")
        case "max":
            return data.scatter_reduce(axis, at, updates, "amax")
        case "min":
            return data.scatter_reduce(axis, at, updates, "amin")
    raise ValueError(f"unknown mode {mode!r}")


@op("scatter_nd", ignores=("validate_indices",))
def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add") -> Tensor:
    depth = indices.shape[-1]
    rows = torch.zeros(indices.shape[:-1], dtype=torch.long)
    for axis in range(depth):
        rows = rows * data.shape[axis] + _from_start(indices[..., axis], data.shape[axis])
    flat = data.reshape(data.shape[:depth].numel(), -1)
    result = scatter(flat, rows.reshape(-1), updates.reshape(rows.numel(), -1), 0, mode)
    return result.reshape(data.shape)


def _from_start(indices: Tensor, size: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)
