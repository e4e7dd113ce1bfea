"""Functions of single elements, compiled by numba: one loop for each kind, which the compiler turns
into vectors. None may reorder operations, so an element's bits do not depend on its place."""

import math

import numpy as np
from numba import njit

from cetane.mil.fast.intrinsics import power_of_two
from cetane.mil.fast.tape.code import Binary, Unary

_F = np.float32
(_SILU, _SIGMOID, _TANH, _GELU_TANH, _GELU, _GELU_SIGMOID, _EXP, _RELU, _SOFTPLUS, _SQRT, _RSQRT,
 _SQUARE, _ABS, _LOG, _CLIP, _INVERSE, _FILL, _ROUND) = (
    int(kind) for kind in list(Unary)[1:]
)  # fmt: skip
(_ADD, _SUB, _MUL, _DIV, _MAXIMUM, _MINIMUM, _EQUAL, _NOT_EQUAL, _GREATER, _GREATER_EQUAL, _LESS,
 _LESS_EQUAL) = (int(kind) for kind in Binary)  # fmt: skip


@njit(nogil=True, cache=True)
def put(target, line):  # type: ignore[no-untyped-def]
    """Copy a line to the beginning of another one. An assignment to a slice does the same, and
    takes numba a second more to compile at each place."""
    for n in range(len(line)):
        target[n] = line[n]


@njit(inline="always", error_model="numpy")
def larger(a, b):  # type: ignore[no-untyped-def]
    """The larger of two numbers; NaN if one is NaN, as numpy's. Python's `max` drops one."""
    return a if a > b or a != a else b


@njit(inline="always", error_model="numpy")
def smaller(a, b):  # type: ignore[no-untyped-def]
    """The smaller of two numbers; NaN if one is NaN."""
    return a if a < b or a != a else b


@njit(inline="always", error_model="numpy")
def exponential(x):  # type: ignore[no-untyped-def]
    """The exponential of a float32, to an error of 2**-23; 0 below -87, infinity above 88.7.

    The polynomial is that of Cephes' expf.
    """
    bounded = _F(-88) if x < _F(-88) else _F(89) if x > _F(89) else x  # NaN stays NaN
    whole = np.rint(bounded * _F(1.44269504))
    rest = (bounded - whole * _F(0.693359375)) + whole * _F(2.12194440e-4)
    y = _F(1.9875691500e-4)
    y = y * rest + _F(1.3981999507e-3)
    y = y * rest + _F(8.3334519073e-3)
    y = y * rest + _F(4.1665795894e-2)
    y = y * rest + _F(1.6666665459e-1)
    y = y * rest + _F(5.0000001201e-1)
    y = (y * (rest * rest) + rest) + _F(1)
    half = np.rint(whole * _F(0.5))  # two factors: 2**128 alone is infinite
    result = (y * power_of_two(half)) * power_of_two(whole - half)
    return _F(0) if x < _F(-87) else result


@njit(inline="always", error_model="numpy")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return _F(1) / (_F(1) + exponential(-x))


@njit(inline="always", error_model="numpy")
def _tanh(x):  # type: ignore[no-untyped-def]
    """Cephes' tanhf: a polynomial near zero, exponentials elsewhere."""
    z = x * x
    y = _F(-5.70498872745e-3)
    y = y * z + _F(2.06390887954e-2)
    y = y * z + _F(-5.37397155531e-2)
    y = y * z + _F(1.33314422036e-1)
    y = y * z + _F(-3.33332819422e-1)
    near = (y * z) * x + x
    size = _F(20) if abs(x) > _F(20) else abs(x)
    far = _F(1) - _F(2) / (exponential(size + size) + _F(1))
    return near if size < _F(0.625) else (far if x > 0 else -far)


@njit(nogil=True, cache=True, error_model="numpy")
def transform(kind, y, x, first, second):  # type: ignore[no-untyped-def]
    """Fill `y` with a function of each element of `x`; both (n,), float32."""
    n = len(y)
    if kind == _SILU:
        for i in range(n):
            y[i] = x[i] * _sigmoid(x[i])
    elif kind == _SIGMOID:
        for i in range(n):
            y[i] = _sigmoid(x[i])
    elif kind == _TANH:
        for i in range(n):
            y[i] = _tanh(x[i])
    elif kind == _GELU_TANH:  # 1 + tanh loses all digits for x below -4
        for i in range(n):
            a = x[i]
            y[i] = a * _sigmoid(_F(1.5957691216057308) * (a + _F(0.044715) * a * a * a))
    elif kind == _GELU:
        for i in range(n):
            y[i] = _F(0.5 * x[i] * math.erfc(-math.sqrt(0.5) * np.float64(x[i])))
    elif kind == _GELU_SIGMOID:
        for i in range(n):
            y[i] = x[i] * _sigmoid(_F(1.702) * x[i])
    elif kind == _EXP:
        for i in range(n):
            y[i] = exponential(x[i])
    elif kind == _RELU:
        for i in range(n):
            y[i] = larger(x[i], _F(0))
    elif kind == _SOFTPLUS:
        for i in range(n):
            y[i] = _F(larger(x[i], _F(0)) + math.log1p(math.exp(-abs(np.float64(x[i])))))
    elif kind == _SQRT:
        for i in range(n):
            y[i] = np.sqrt(x[i])
    elif kind == _RSQRT:
        for i in range(n):
            y[i] = _F(1) / np.sqrt(x[i] + first)
    elif kind == _SQUARE:
        for i in range(n):
            y[i] = x[i] * x[i]
    elif kind == _ABS:
        for i in range(n):
            y[i] = abs(x[i])
    elif kind == _LOG:
        for i in range(n):
            y[i] = _F(math.log(np.float64(x[i] + first)))
    elif kind == _CLIP:
        for i in range(n):
            y[i] = smaller(larger(x[i], first), second)
    elif kind == _INVERSE:
        for i in range(n):
            y[i] = _F(1) / (x[i] + first)
    elif kind == _FILL:
        y[:] = first
    elif kind == _ROUND:
        for i in range(n):
            y[i] = np.rint(x[i])
    else:
        for i in range(n):
            y[i] = x[i]


@njit(nogil=True, cache=True, error_model="numpy")
def combine(kind, y, a, b):  # type: ignore[no-untyped-def]
    """Fill `y` with a function of each pair of elements; all (n,), float32. Comparisons give 1 or
    0."""
    n = len(y)
    if kind == _ADD:
        for i in range(n):
            y[i] = a[i] + b[i]
    elif kind == _MUL:
        for i in range(n):
            y[i] = a[i] * b[i]
    elif kind == _SUB:
        for i in range(n):
            y[i] = a[i] - b[i]
    elif kind == _DIV:
        for i in range(n):
            y[i] = a[i] / b[i]
    elif kind == _MAXIMUM:
        for i in range(n):
            y[i] = larger(a[i], b[i])
    elif kind == _MINIMUM:
        for i in range(n):
            y[i] = smaller(a[i], b[i])
    else:
        for i in range(n):
            holds = (
                (a[i] == b[i])
                if kind == _EQUAL
                else (a[i] != b[i])
                if kind == _NOT_EQUAL
                else (a[i] > b[i])
                if kind == _GREATER
                else (a[i] >= b[i])
                if kind == _GREATER_EQUAL
                else (a[i] < b[i])
                if kind == _LESS
                else (a[i] <= b[i])
            )
            y[i] = _F(1) if holds else _F(0)
