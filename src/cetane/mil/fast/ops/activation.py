"""Activations."""

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates


@translates("relu")
def relu(g: OnnxGraph, x: Tensor) -> str:
    return g("Relu", x)


@translates("relu6")
def relu6(g: OnnxGraph, x: Tensor) -> str:
    return g("Clip", x, g.floats(0), g.floats(6))


@translates("leaky_relu")
def leaky_relu(g: OnnxGraph, x: Tensor, alpha: float) -> str:
    return g("LeakyRelu", x, alpha=alpha)


@translates("sigmoid")
def sigmoid(g: OnnxGraph, x: Tensor) -> str:
    return g("Sigmoid", x)


@translates("silu")
def silu(g: OnnxGraph, x: Tensor) -> str:
    return g("Mul", x, g("Sigmoid", x))


@translates("softplus")
def softplus(g: OnnxGraph, x: Tensor) -> str:
    return g("Softplus", x)


@translates("gelu")
def gelu(g: OnnxGraph, x: Tensor, mode: str = "EXACT") -> str:
    match mode:
        case "EXACT":
            return g("Gelu", x)
        case "TANH_APPROXIMATION":
            return g("Gelu", x, approximate="tanh")
        case "SIGMOID_APPROXIMATION":
            return g("Mul", x, g("Sigmoid", g("Mul", x, g.floats(1.702))))
    raise ValueError(f"unknown mode {mode!r}")


@translates("softmax")
def softmax(g: OnnxGraph, x: Tensor, axis: int = -1) -> str:
    return g("Softmax", x, axis=axis)
