"""Activations."""

from cetane.mil.fast.graph import Graph, Tensor
from cetane.mil.fast.registry import lowers


@lowers("relu")
def relu(g: Graph, x: Tensor) -> str:
    return g("Relu", x)


@lowers("relu6")
def relu6(g: Graph, x: Tensor) -> str:
    return g("Clip", x, g.floats(0), g.floats(6))


@lowers("leaky_relu")
def leaky_relu(g: Graph, x: Tensor, alpha: float) -> str:
    return g("LeakyRelu", x, alpha=alpha)


@lowers("sigmoid")
def sigmoid(g: Graph, x: Tensor) -> str:
    return g("Sigmoid", x)


@lowers("silu")
def silu(g: Graph, x: Tensor) -> str:
    return g("Mul", x, g("Sigmoid", x))


@lowers("softplus")
def softplus(g: Graph, x: Tensor) -> str:
    return g("Softplus", x)


@lowers("gelu")
def gelu(g: Graph, x: Tensor, mode: str = "EXACT") -> str:
    match mode:
        case "EXACT":
            return g("Gelu", x)
        case "TANH_APPROXIMATION":
            return g("Gelu", x, approximate="tanh")
        case "SIGMOID_APPROXIMATION":
            return g("Mul", x, g("Sigmoid", g("Mul", x, g.floats(1.702))))
    raise ValueError(f"unknown mode {mode!r}")


@lowers("softmax")
def softmax(g: Graph, x: Tensor, axis: int = -1) -> str:
    return g("Softmax", x, axis=axis)
