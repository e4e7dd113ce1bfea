"""Element by element, with broadcasting."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cetane.mil.dtypes import NUMPY
from cetane.mil.ops.registry import op
from cetane.mil.storage import STORAGE

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floor": torch.floor,
    "logical_not": torch.logical_not,
    "round": torch.round,  # halves go to the even neighbour
    "sin": torch.sin,
    "sinh": torch.sinh,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "equal": torch.eq,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "not_equal": torch.ne,
    "pow": torch.pow,
    "real_div": torch.true_divide,
    "sub": torch.sub,
}


_ROUNDED = frozenset(
    ("acos", "asin", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "sin", "sinh", "tan",
     "tanh")
)  # fmt: skip
"""Functions that are computed in float64, so that no result depends on its place (`activation`)."""


def _unary(kind: str, function: Callable[[Tensor], Tensor]) -> None:
    @op(kind)
    def apply(x: Tensor) -> Tensor:
        return function(x.double()).float() if kind in _ROUNDED else function(x)


def _binary(kind: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @op(kind)
    def apply(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)


for _kind, _one in _UNARY.items():
    _unary(_kind, _one)
for _kind, _two in _BINARY.items():
    _binary(_kind, _two)


# MKL's square root is sometimes off by one unit in the last place. In float64, such an error does
# not change the result that is rounded to float32.


@op("sqrt")
def sqrt(x: Tensor) -> Tensor:
    return torch.sqrt(x.double())


@op("rsqrt")
def rsqrt(x: Tensor, epsilon: float = 1e-12) -> Tensor:
    return 1 / torch.sqrt(x.double() + epsilon)


@op("inverse")
def inverse(x: Tensor, epsilon: float = 1e-4) -> Tensor:
    return 1 / (x.double() + epsilon)


@op("sign")
def sign(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, x.sign())  # torch's sign of NaN is 0


@op("log")
def log(x: Tensor, epsilon: float = 1e-45) -> Tensor:
    return torch.log(x + epsilon)


@op("floor_div")
def floor_div(x: Tensor, y: Tensor) -> Tensor:
    if x.is_floating_point():
        return torch.floor_divide(x, y)
    # A processor that divides the lowest integer by -1 ends the process.
    return torch.where(y == -1, -x, torch.floor_divide(x, torch.where(y == -1, 1, y)))


@op("mod")
def mod(x: Tensor, y: Tensor) -> Tensor:
    """The sign is the divisor's."""
    return torch.remainder(x, y if x.is_floating_point() else torch.where(y == -1, 1, y))


@op("clip")
def clip(x: Tensor, alpha: float, beta: float) -> Tensor:
    return x.clamp(alpha, beta)


@op("threshold")
def threshold(x: Tensor, alpha: float) -> Tensor:
    return x.clamp(min=alpha)


@op("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    """Floats become integers towards zero. Values out of range become the nearest limit, and NaN
    becomes 0, as in ARM's instructions: C does not define these results. Integers wrap around."""
    held = STORAGE[dtype]
    whole = NUMPY[dtype]
    if x.is_floating_point() and issubclass(whole, np.integer):
        limits = np.iinfo(whole)
        # Compared before the conversion: as floats, the limits of wide integers are not exact.
        low, high = x < limits.min, x >= float(limits.max)
        fits = x.masked_fill(low | high | x.isnan(), 0).to(held)
        return fits.masked_fill(low, limits.min).masked_fill(high, limits.max)
    if whole in (np.uint16, np.uint32):  # held in wider integers
        x = x.to(held) & np.iinfo(whole).max
    return x.to(held)


@op("quantize")
def quantize(
    input: Tensor,
    scale: Tensor,
    output_dtype: str,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> Tensor:
    steps = torch.round(input / along_axis(scale, input, axis))
    if zero_point is not None:
        steps = steps + along_axis(zero_point, input, axis)
    limits = torch.iinfo(STORAGE[output_dtype])
    return steps.clamp(limits.min, limits.max).to(STORAGE[output_dtype])


@op("dequantize")
def dequantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None
) -> Tensor:
    steps = input.to(scale.dtype)
    if zero_point is not None:
        steps = steps - along_axis(zero_point, input, axis)
    return steps * along_axis(scale, input, axis)


def along_axis(vector: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Shape a vector so that it broadcasts along one axis of `x`; a scalar stays as it is."""
    if axis is None or vector.ndim == 0:
        return vector
    shape = [1] * x.ndim
    shape[axis] = -1
    return vector.reshape(shape)
