"""Reductions, scans and sorting along axes."""

from collections.abc import Callable

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


def _reduction(kind: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    """Register a reduction over several axes; by default over all.

    Floats are summed in float64, so that the sums of a row do not depend on the number of rows.
    """

    @op(kind)
    def apply(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
        wide = x.double() if x.is_floating_point() else x
        result = function(wide, list(range(x.ndim)) if axes is None else axes, keep_dims)
        return result.float() if result.is_floating_point() else result


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.double().mean(axes, keep)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keep)
    return x


_reduction("reduce_sum", lambda x, axes, keep: x.sum(axes, keep))
_reduction("reduce_mean", _mean)
_reduction("reduce_max", lambda x, axes, keep: x.amax(axes, keep))
_reduction("reduce_min", lambda x, axes, keep: x.amin(axes, keep))
_reduction("reduce_prod", _prod)
_reduction("reduce_l1_norm", lambda x, axes, keep: x.abs().sum(axes, keep))
_reduction("reduce_l2_norm", lambda x, axes, keep: x.square().sum(axes, keep).sqrt())
_reduction("reduce_sum_square", lambda x, axes, keep: x.square().sum(axes, keep))
_reduction("reduce_log_sum", lambda x, axes, keep: x.sum(axes, keep).log())
_reduction("reduce_log_sum_exp", lambda x, axes, keep: x.logsumexp(axes, keep))


@op("reduce_argmax", ignores=("output_dtype",))
def reduce_argmax(x: Tensor, axis: int = -1, keep_dims: bool = False) -> Tensor:
    return x.argmax(axis, keep_dims)


@op("reduce_argmin", ignores=("output_dtype",))
def reduce_argmin(x: Tensor, axis: int = -1, keep_dims: bool = False) -> Tensor:
    return x.argmin(axis, keep_dims)


@op("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    if reverse:
        return cumsum(x.flip(axis), axis, exclusive).flip(axis)
    if exclusive:  # starts with a zero and leaves the last element out
        x = torch.cat([torch.zeros_like(x.narrow(axis, 0, 1)), x], axis)
        x = x.narrow(axis, 0, x.shape[axis] - 1)
    return x.cumsum(axis)


@op("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    return x.argsort(dim=axis, descending=not ascending, stable=True)


@op("topk", ignores=("sort", "output_indices_dtype"))
def topk(
    x: Tensor, k: int = 1, axis: int = -1, ascending: bool = False, return_indices: bool = True
) -> Tensor | tuple[Tensor, ...]:
    count = x.shape[axis] if k == -1 else k
    values, indices = x.sort(dim=axis, descending=not ascending, stable=True)
    best = values.narrow(axis, 0, count)
    return (best, indices.narrow(axis, 0, count)) if return_indices else best
