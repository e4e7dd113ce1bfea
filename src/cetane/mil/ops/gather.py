"""Reading and writing at computed positions.

Negative indices count from the end, unless `validate_indices` (iOS 17) forbids them.
"""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("gather")
def gather(
    x: Tensor,
    indices: Tensor,
    axis: int = 0,
    batch_dims: int = 0,
    validate_indices: bool = False,
) -> Tensor:
    axis %= x.ndim
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        rows = [gather(one, at, axis - 1, batch_dims - 1, validate_indices) for one, at in pairs]
        return torch.stack(rows)
    at = _from_start(indices, x.shape[axis], validate_indices)
    taken = x.index_select(axis, at.reshape(-1))
    return taken.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@op("gather_along_axis")
def gather_along_axis(
    x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool = False
) -> Tensor:
    return x.take_along_dim(_from_start(indices, x.shape[axis], validate_indices), axis)


@op("gather_nd")
def gather_nd(
    x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    if batch_dims:
        pairs = zip(x, indices, strict=True)
        rows = [gather_nd(one, at, batch_dims - 1, validate_indices) for one, at in pairs]
        return torch.stack(rows)
    axes = zip(indices.unbind(-1), x.shape, strict=False)
    return x[tuple(_from_start(at, size, validate_indices) for at, size in axes)]


@op("scatter")
def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    shape = [1] * data.ndim
    shape[axis] = -1
    along = indices.reshape(shape).expand(updates.shape)
    return scatter_along_axis(data, along, updates, axis, mode, validate_indices)


@op("scatter_along_axis")
def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    at = _from_start(indices, data.shape[axis], validate_indices)
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


@op("scatter_nd")
def scatter_nd(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    depth = indices.shape[-1]
    rows = torch.zeros(indices.shape[:-1], dtype=torch.long)
    for axis in range(depth):
        size = data.shape[axis]
        rows = rows * size + _from_start(indices[..., axis], size, validate_indices)
    length = data.shape[depth:].numel()
    flat = data.reshape(-1, length)
    result = scatter(flat, rows.reshape(-1), updates.reshape(-1, length), 0, mode)
    return result.reshape(data.shape)


def _from_start(indices: Tensor, size: int, validate: bool) -> Tensor:
    indices = indices.long()
    if validate and bool(((indices < 0) | (indices >= size)).any()):
        raise ValueError(f"an index is out of bounds for {size} elements")
    return torch.where(indices < 0, indices + size, indices)
