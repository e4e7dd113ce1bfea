"""The loops over the elements of a weight that learns, on tensors of any device.

What stands here is each loop in torch. For tensors of the CPU, numba's kernel of the same name runs
instead (`kernels`): in torch they took longer than the model's own computation. On a GPU each torch
op takes a launch, and a step has hundreds of weights. So the loops have few ops.

All tensors of a call are contiguous, and on one device. Results go into the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVarTuple

import torch
from torch import Tensor

TINY = 1e-20
"""Keeps divisors above zero."""

Rest = TypeVarTuple("Rest")


def by_kernel(tensor: Tensor) -> bool:
    """Whether the loops over this tensor are numba's."""
    return tensor.device.type == "cpu"


def loop(in_torch: Callable[[Tensor, *Rest], None]) -> Callable[[Tensor, *Rest], None]:
    """A loop that has a kernel too; the form in torch stays there as `__wrapped__`."""

    @wraps(in_torch)
    def run(first: Tensor, *rest: *Rest) -> None:
        if not by_kernel(first):
            return in_torch(first, *rest)
        from cetane.fitting import kernels  # here because numba takes a while to load

        kernel = getattr(kernels, in_torch.__name__)
        kernel(*(one.numpy() if isinstance(one, Tensor) else one for one in (first, *rest)))

    return run


@loop
def gather(gradients: Tensor, indices: Tensor, sums: Tensor, squares: Tensor) -> None:
    """Sum the gradients of a row's elements by their levels, `sums (O, K)`, and the squares of a
    column's, `squares (I,)`."""
    sums.zero_().scatter_add_(1, indices.long(), gradients)
    torch.sum(gradients.square(), 0, out=squares)


@loop
def follow(
    gradients: Tensor,
    levels: Tensor,
    rates: Tensor,
    shares: Tensor,
    keep: float,
    keep_squares: float,
    second: float,
    squares: Tensor,
    wanted: Tensor,
    means: Tensor,
    indices: Tensor,
    values: Tensor,
) -> None:
    """Move the wish of each element against the mean of its gradients, and round it to the nearest
    level. The kernel describes the arguments."""
    lengths = torch.linalg.vector_norm(gradients * shares, dim=1)
    share = (1 - keep_squares) / gradients.shape[1]
    squares.mul_(keep_squares).addcmul_(lengths, lengths, value=share)
    rate = rates / ((squares / second).sqrt_() + TINY)
    means.lerp_(gradients, 1 - keep)
    wanted.addcmul_(means * shares, rate[:, None], value=-1)
    # a wish on a border has the lower level, as in the kernel
    places = torch.searchsorted((levels[:, 1:] + levels[:, :-1]) / 2, wanted)
    indices.copy_(places)
    torch.gather(levels, 1, places, out=values)


@loop
def look_up(levels: Tensor, indices: Tensor, values: Tensor) -> None:
    """Give every element the value of its level; `levels` are `(O, K)`."""
    torch.gather(levels, 1, indices.long(), out=values)


@loop
def gather_vectors(gradients: Tensor, indices: Tensor, sums: Tensor) -> None:
    """Sum the gradients `(O, I)` of a row of vectors by their entries, `sums (O / V, K, V)`;
    `indices (O / V, I)`."""
    vectors, entries, length = sums.shape
    slopes, places = gradients.view(vectors, length, -1), indices.long()[:, None]
    by_axis = gradients.new_zeros(vectors, length, entries)
    sums.copy_(by_axis.scatter_add_(2, places.expand_as(slopes), slopes).mT)


@loop
def look_up_vectors(entries: Tensor, indices: Tensor, values: Tensor) -> None:
    """Give every vector of V elements, one below the other, its entry; `entries` are `(O / V, K,
    V)`."""
    vectors, _, length = entries.shape
    places = indices.long()[:, None].expand(-1, length, -1)
    torch.gather(entries.mT, 2, places, out=values.view(vectors, length, -1))
