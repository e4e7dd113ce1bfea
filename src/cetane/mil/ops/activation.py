"""Activations."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("relu")
def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


@op("relu6")
def relu6(x: Tensor) -> Tensor:
    return x.clamp(0, 6)


@op("leaky_relu")
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x < 0, x * alpha, x)


@op("sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@op("silu")
def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@op("softplus")
def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


@op("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    match mode:
        case "EXACT":
            return torch.nn.functional.gelu(x)
        case "TANH_APPROXIMATION":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case "SIGMOID_APPROXIMATION":
            return x * torch.sigmoid(1.702 * x)
    raise ValueError(f"unknown mode {mode!r}")


@op("softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)
