"""Activations.

torch computes the last elements of a tensor one by one, not in vectors, and the two ways differ in
the last bit. So functions that are not exact are computed in float64: then no result depends on its
place.
"""

import math

import torch
from torch import Tensor

from cetane.mil.ops.elementwise import along_axis
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
    return torch.sigmoid(x.double()).float()


@op("silu")
def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


@op("softplus")
def softplus(x: Tensor) -> Tensor:
    wide = x.double()
    return torch.logaddexp(wide, torch.zeros_like(wide)).float()


@op("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """Formulas without a subtraction: 1 + erf and 1 + tanh lose all digits for x below -4."""
    match mode:
        case "EXACT":
            return (0.5 * x * torch.special.erfc(-math.sqrt(0.5) * x.double())).float()
        case "TANH_APPROXIMATION":
            return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
        case "SIGMOID_APPROXIMATION":
            return x * sigmoid(1.702 * x)
    raise ValueError(f"unknown mode {mode!r}")


@op("softmax")
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x.double(), axis).float()


@op("softsign")
def softsign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@op("elu")
def elu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x))


@op("clamped_relu")
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.where(x < 0, x * alpha, x).clamp(max=beta)


@op("thresholded_relu")
def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x < alpha, 0, x)


@op("linear_activation")
def linear_activation(x: Tensor, alpha: float, beta: float) -> Tensor:
    return x * alpha + beta


@op("scaled_tanh")
def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    return alpha * torch.tanh(beta * x)


@op("sigmoid_hard")
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Tensor:
    return (x * alpha + beta).clamp(0, 1)


@op("prelu")
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    """One slope per channel, which is axis 1."""
    return torch.where(x < 0, x * along_axis(alpha, x, 1), x)


@op("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return along_axis(alpha, x, 1) * softplus(along_axis(beta, x, 1) * x)
