"""Element by element, with broadcasting."""

import numpy as np
from onnx import TensorProto

from cetane.mil.fast.context import WIDENED
from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates

_UNARY = {
    "abs": "Abs",
    "acos": "Acos",
    "asin": "Asin",
    "atan": "Atan",
    "atanh": "Atanh",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "logical_not": "Not",
    "round": "Round",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}
"""MIL ops that are one ONNX op with the same inputs in the same order."""
_BINARY = {
    "add": "Add",
    "equal": "Equal",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "less": "Less",
    "less_equal": "LessOrEqual",
    "logical_and": "And",
    "logical_or": "Or",
    "logical_xor": "Xor",
    "maximum": "Max",
    "minimum": "Min",
    "mul": "Mul",
    "pow": "Pow",
    "sub": "Sub",
}
_INTEGERS = {
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "uint8": TensorProto.UINT8,
    "uint16": TensorProto.UINT16,
}
"""The types that `cast` goes through, so that values wrap around as they do in MIL."""


def _unary(kind: str, onnx_kind: str) -> None:
    @translates(kind)
    def translate(g: OnnxGraph, x: Tensor) -> str:
        return g(onnx_kind, x)


def _binary(kind: str, onnx_kind: str) -> None:
    @translates(kind)
    def translate(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
        return g(onnx_kind, x, y)


for _kind, _onnx_kind in _UNARY.items():
    _unary(_kind, _onnx_kind)
for _kind, _onnx_kind in _BINARY.items():
    _binary(_kind, _onnx_kind)


@translates("not_equal")
def not_equal(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
    return g("Not", g("Equal", x, y))


@translates("square")
def square(g: OnnxGraph, x: Tensor) -> str:
    return g("Mul", x, x)


@translates("exp2")
def exp2(g: OnnxGraph, x: Tensor) -> str:
    return g("Pow", g.floats(2), x)


@translates("real_div")
def real_div(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
    if x.is_float:
        return g("Div", x, y)
    return g.cast(g("Div", g.cast(x, "fp32"), g.cast(y, "fp32")), x.dtype)


@translates("floor_div")
def floor_div(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
    if x.is_float:
        return _floor_div_of_floats(g, x, y)
    multiple = g("Sub", x, mod(g, x, y))
    # A processor that divides the lowest integer by -1 ends the process.
    one, negative = g.like(1, x), g("Equal", y, g.like(-1, x))
    quotient = g("Div", multiple, g("Where", negative, one, y))
    return g("Mul", quotient, g("Where", negative, y, one))


def _floor_div_of_floats(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
    """The steps of numpy and torch, so that zeros and infinities give the same."""
    rest, opposite = _rest(g, x, y)
    quotient = g("Div", g("Sub", x, rest), y)
    quotient = g("Where", opposite, g("Sub", quotient, g.floats(1)), quotient)
    lower = g("Floor", quotient)
    above = g("Greater", g("Sub", quotient, lower), g.floats(0.5))
    nearest = g("Where", above, g("Add", lower, g.floats(1)), lower)
    return g("Where", g("Equal", y, g.floats(0)), g("Div", x, y), nearest)


@translates("mod")
def mod(g: OnnxGraph, x: Tensor, y: Tensor) -> str:
    """The sign is the divisor's."""
    if not x.is_float:
        return g("Mod", x, y)
    rest, opposite = _rest(g, x, y)
    return g("Where", opposite, g("Add", rest, y), rest)


def _rest(g: OnnxGraph, x: Tensor, y: Tensor) -> tuple[str, str]:
    """What a division of floats towards zero leaves, and whether the divisor's sign is another."""
    rest = g("Mod", x, y, fmod=1)
    return rest, g("Less", g("Mul", g("Sign", rest), y), g.floats(0))


@translates("inverse")
def inverse(g: OnnxGraph, x: Tensor, epsilon: float = 1e-4) -> str:
    return g("Reciprocal", g("Add", x, g.floats(epsilon)))


@translates("log")
def log(g: OnnxGraph, x: Tensor, epsilon: float = 1e-45) -> str:
    return g("Log", g("Add", x, g.floats(epsilon)))


@translates("rsqrt")
def rsqrt(g: OnnxGraph, x: Tensor, epsilon: float = 1e-12) -> str:
    return g("Reciprocal", g("Sqrt", g("Add", x, g.floats(epsilon))))


@translates("clip")
def clip(g: OnnxGraph, x: Tensor, alpha: float, beta: float) -> str:
    return g("Clip", x, g.like(alpha, x), g.like(beta, x))


@translates("threshold")
def threshold(g: OnnxGraph, x: Tensor, alpha: float) -> str:
    return g("Max", x, g.like(alpha, x))


def _within(g: OnnxGraph, x: Tensor, dtype: str) -> str:
    """Floats at the nearest limit of an integer's type, and 0 for NaN, as the reference does."""
    limits = np.iinfo(dtype)
    return g("Clip", _known(g, x), g.floats(limits.min), g.floats(limits.max))


def _known(g: OnnxGraph, x: Tensor) -> str:
    """Floats with 0 in place of NaN."""
    return g("Where", g("IsNaN", x), g.floats(0), x)


@translates("cast")
def cast(g: OnnxGraph, x: Tensor, dtype: str) -> str:
    if dtype == "int32" and x.is_float:
        end = 2.0**31  # as a float; the type's own limit has none
        inside = g("Clip", _known(g, x), g.floats(-end), g.floats(np.nextafter(end, 0, dtype="f4")))
        largest = g.literal(np.array(np.iinfo(np.int32).max, np.int32))
        return g("Where", g("GreaterOrEqual", x, g.floats(end)), largest, g.cast(inside, dtype))
    if dtype in _INTEGERS:
        narrow = g("Cast", _within(g, x, dtype) if x.is_float else x, to=_INTEGERS[dtype])
        return g.cast(narrow, dtype)
    return g.cast(x, dtype)


@translates(WIDENED, ignores=("mask",))
def widened(g: OnnxGraph, x: Tensor, scales: Tensor) -> str:
    """Whole numbers of 8 bits times their scales. A graph widens hidden slots too."""
    return g("Mul", g.cast(x, "fp32"), scales)


@translates("quantize")
def quantize(
    g: OnnxGraph,
    input: Tensor,
    scale: Tensor,
    output_dtype: str,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> str:
    steps = g("Round", g("Div", input, _along(g, scale, input, axis)))
    if zero_point is not None:
        steps = g("Add", steps, g.cast(_along(g, zero_point, input, axis), "fp32"))
    limits = np.iinfo(output_dtype)
    return g.cast(g("Clip", steps, g.floats(limits.min), g.floats(limits.max)), output_dtype)


@translates("dequantize")
def dequantize(
    g: OnnxGraph,
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> str:
    steps = input.name
    if zero_point is not None:
        steps = g("Sub", steps, _along(g, zero_point, input, axis))
    return g("Mul", g.cast(steps, "fp32"), _along(g, scale, input, axis))


def _along(g: OnnxGraph, vector: Tensor, x: Tensor, axis: int | None) -> str:
    """A vector shaped to broadcast along one axis of `x`; a scalar stays as it is."""
    if axis is None or vector.rank == 0:
        return vector.name
    return g("Reshape", vector, g.ints([-1] + [1] * (x.rank - 1 - axis % x.rank)))
