"""Products of computed matrices as an Apple Neural Engine was seen to compute them.

Apple does not say how it does. These three rules explain the errors that were published for
softmax(S) V at 4,096 keys (docs/explanation/precision.md has the table):

- a product is rounded to fp16, and counts as zero below 2**-14, where fp16 is subnormal;
- eight products in a row are summed in fp16;
- these sums are added in fp32, and the result is rounded once.

Sums of fewer than `SHORT` terms are computed as in "fp16": the published figures say nothing about
them, and there the rules change little.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from torch import Tensor

from cetane.hardware import LARGEST_FP16
from cetane.mil.ops import linear
from cetane.mil.ops.activation import softmax
from cetane.mil.storage import to_dtype
from cetane.threads import over_rows

SHORT = 256
"""The fewest terms of a sum to which the rules apply. Heads have fewer channels, so only sums over
keys reach it."""
GROUP = 8
"""Products in a row that are summed in fp16. For an attention scaled by 64, an error of 0.060 % was
published. Groups of 4 give 0.048 %, groups of 8 0.056 %, groups of 16 0.074 %."""
LEAST = np.float32(2.0**-14)
"""The least normal number of fp16."""
EDGE = np.float32(2.0**-14 - 2.0**-25)
"""The least number that rounds to `LEAST`."""
LARGEST = np.float32(LARGEST_FP16)

_MATRICES = re.compile(r"(\w?)(\w)(\w)(\w),\1\4\3(\w)->\1\2\3\5")
Matrix = npt.NDArray[np.float32]
_Rows = types.Array(types.float32, 2, "C", readonly=True)


@njit(inline="always")
def _half(x):  # type: ignore[no-untyped-def]
    """A float32 rounded to eleven bits, ties to even; infinite beyond fp16."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32((bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.float32(np.inf) * rounded if abs(rounded) > LARGEST else rounded


@njit(types.void(_Rows, types.float32[:, ::1], _Rows), nogil=True, cache=True)
def multiply(rows, results, columns):  # type: ignore[no-untyped-def]
    """Fill `results (M, N)` with `rows (M, K)` times `columns (K, N)`."""
    terms, width = columns.shape
    group = np.empty(width, dtype=np.float32)
    for row in range(len(rows)):
        total = results[row]
        total[:] = 0
        for start in range(0, terms, GROUP):
            group[:] = 0
            for term in range(start, min(start + GROUP, terms)):
                factor = rows[row, term]
                if factor == 0:  # the weight of every masked key
                    continue
                for n in range(width):
                    product = factor * columns[term, n]
                    if abs(product) < EDGE:
                        product = np.float32(0)
                    elif abs(product) < LEAST:
                        product = LEAST if product > 0 else -LEAST
                    group[n] = _half(group[n] + _half(product))
            for n in range(width):
                total[n] += group[n]


def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """MIL's `matmul` of tensors `(..., M, K)` and `(..., K, N)`: float32 that hold fp16 values.

    Vectors, integers and sums of fewer than `SHORT` terms go to `linear.matmul`.
    """
    terms = x.shape[-2 if transpose_x and x.ndim > 1 else -1]
    floats = x.is_floating_point() and y.is_floating_point()
    if min(x.ndim, y.ndim) < 2 or terms < SHORT or not floats:
        return linear.matmul(x, y, transpose_x, transpose_y)
    x, y = x.mT if transpose_x else x, y.mT if transpose_y else y
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    lefts, rights = (rows_of(one.expand(*batch, *one.shape[-2:])) for one in (x, y))
    results = np.empty((len(lefts), x.shape[-2], y.shape[-1]), np.float32)
    for left, right, result in zip(lefts, rights, results, strict=True):
        over_rows(lambda *parts, columns=right: multiply(*parts, columns), left, result)
    return torch.from_numpy(results).reshape(*batch, *results.shape[1:])


def einsum(values: list[Tensor], equation: str) -> Tensor:
    """MIL's `einsum` of matrices `(..., M, B, K)` and `(..., K, B, N)`: the only products that Core
    ML takes. Other equations go to `linear.einsum`."""
    if not _MATRICES.fullmatch(equation.replace(" ", "")):
        return linear.einsum(values, equation)
    x, y = (value.transpose(-3, -2) for value in values)
    return matmul(x, y).transpose(-3, -2)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """MIL's attention in the steps that coremltools writes for iOS 17, each rounded to fp16."""
    scaled = half(query * half(torch.tensor(1 / math.sqrt(query.shape[-1]))))
    scores = half(matmul(scaled, key, transpose_y=True))
    return matmul(half(softmax(half(linear.masked(scores, attn_mask)))), value)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "matmul": matmul,
    "einsum": einsum,
    "scaled_dot_product_attention": scaled_dot_product_attention,
}
"""The ops that multiply computed matrices, by kind."""


def half(x: Tensor) -> Tensor:
    """A tensor rounded to fp16."""
    return to_dtype(x, "fp16", rounds=True)


def rows_of(x: Tensor) -> npt.NDArray[Any]:
    """A tensor `(..., M, N)` as an array `(B, M, N)`."""
    return np.ascontiguousarray(x.float().reshape(-1, *x.shape[-2:]).numpy())
