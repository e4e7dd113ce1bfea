"""Normalisations."""

import torch
from torch import Tensor

from cetane.mil.ops.elementwise import along_axis
from cetane.mil.ops.registry import op


@op("layer_norm")
def layer_norm(
    x: Tensor,
    axes: list[int] | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    normalized = {axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)}
    y = _standardize(x, sorted(normalized), epsilon)
    shape = [size if axis in normalized else 1 for axis, size in enumerate(x.shape)]
    return _affine(
        y,
        None if gamma is None else gamma.reshape(shape),
        None if beta is None else beta.reshape(shape),
    )


@op("instance_norm")
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    y = _standardize(x, list(range(2, x.ndim)), epsilon)
    return _affine_channels(y, gamma, beta)


@op("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    y = (x - along_axis(mean, x, 1)) / torch.sqrt(along_axis(variance, x, 1) + epsilon)
    return _affine_channels(y, gamma, beta)


@op("local_response_norm")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    return torch.nn.functional.local_response_norm(x, size, alpha, beta, k)


@op("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The norm is over the last three axes."""
    total = x.double().square().sum((-3, -2, -1), keepdim=True)
    return (x / torch.sqrt(total + epsilon)).float()


def _standardize(x: Tensor, axes: list[int], epsilon: float) -> Tensor:
    wide = x.double()  # so that a token's sums do not depend on the number of tokens
    centred = wide - wide.mean(axes, keepdim=True)
    return (centred / torch.sqrt(centred.square().mean(axes, keepdim=True) + epsilon)).float()


def _affine_channels(y: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    return _affine(
        y,
        None if gamma is None else along_axis(gamma, y, 1),
        None if beta is None else along_axis(beta, y, 1),
    )


def _affine(y: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    if gamma is not None:
        y = y * gamma
    return y if beta is None else y + beta
