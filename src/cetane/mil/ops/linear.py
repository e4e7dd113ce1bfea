"""Products: matrices, convolutions, attention.

A row's result does not depend on the number of rows, so a token has the same result among four and
alone. The math library sums products of few rows in another order than those of many. So products
with weights take a multiple of `ROWS` rows. Products of computed matrices are summed in float64:
their sums also run over keys, whose order changes when other tokens share the call.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cetane.mil.ops.registry import Tensors, op

ROWS = 16
"""Rows of inputs are padded to a multiple of this number. Then the math library sums a row in the
same order for any number of rows: `tests/mil/test_rows.py` tries it. 8 are enough on AMD's
processors, not on Intel's."""
OUTPUTS = 16
"""The fewest rows of a weight, which are padded too. With fewer, the order in which the library
sums 37 numbers depends on the number of rows of inputs."""


@op("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = times_weight(x, weight)
    return y if bias is None else y + bias


def times_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Rows `x (..., T, K)` times a weight `(N, K)`."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    padded = with_rows(rows, -len(rows) % ROWS)
    columns = with_rows(weight.to(dtype), max(0, OUTPUTS - len(weight))).mT
    product = (padded @ columns)[: len(rows), : len(weight)]
    return product.reshape(*x.shape[:-1], len(weight))


def with_rows(matrix: Tensor, more: int) -> Tensor:
    """A matrix with `more` rows of zeros below it. For none, torch's `pad` would copy it too."""
    return functional.pad(matrix, (0, 0, 0, more)) if more else matrix


@op("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    if transpose_x and x.ndim > 1:
        x = x.mT
    if transpose_y and y.ndim > 1:
        y = y.mT
    return _matmul(x, y)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """The product in the wider dtype of the two: iOS 17 multiplies integers by floats."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    wide = torch.float64 if dtype.is_floating_point else dtype
    return (x.to(wide) @ y.to(wide)).to(dtype)


@op("einsum")
def einsum(values: Tensors, equation: str) -> Tensor:
    return torch.einsum(equation, *values)


@op("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    scores = _matmul(query, key.mT) / math.sqrt(query.shape[-1])
    weights = torch.softmax(masked(scores, attn_mask).double(), -1).float()
    return _matmul(weights, value)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores under a mask: booleans tell which keys count, numbers are added."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


@op("conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    rank = x.ndim - 2
    strides = strides or [1] * rank
    dilations = dilations or [1] * rank
    if pad_type.lower() == "custom":
        edges = pad or [0] * 2 * rank
    else:
        edges = implied_padding(pad_type, x.shape[2:], weight.shape[2:], strides, dilations)
    if set((*weight.shape[2:], *strides, groups)) == {1} and not any(edges):
        y = times_weight(x.flatten(2).mT, weight.flatten(1)).mT.reshape(
            len(x), len(weight), *x.shape[2:]
        )
        return y if bias is None else y + bias.reshape(-1, *[1] * rank)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    padded = functional.pad(x, last_first(edges))
    return convolve(padded, weight, bias, strides, 0, dilations, groups)


@op("conv_quantized")
def conv_quantized(
    x: Tensor,
    weight: Tensor,
    quantization_type: str,
    quant_scale: Tensor,
    quant_bias: Tensor,
    nbits: int = 8,
    bias: Tensor | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """Linear weights only: integers times a scale, plus a bias, both per output channel or one for
    all. coremltools gives the convolution's bias the integers' type."""
    if quantization_type != "linear":
        raise ValueError(f"quantization_type {quantization_type!r} is not supported")
    per_channel = [-1] + [1] * (weight.ndim - 1)
    real = weight * quant_scale.reshape(per_channel) + quant_bias.reshape(per_channel)
    bias = None if bias is None else bias.to(real.dtype)
    return conv(x, real, bias, strides, pad_type, pad, dilations, groups)


@op("conv_transpose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: list[int] | None = None,
    output_shape: list[int] | None = None,
    pad_type: str = "valid",
    strides: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """The full result of the kernel, cropped: by `pad`, or on both sides to `output_shape` or to
    size times stride ("same"). A larger output shape is filled with the bias."""
    rank = x.ndim - 2
    strides = strides or [1] * rank
    transposed = (
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
    )[rank - 1]
    y = transposed(x, weight, None, strides, groups=groups, dilation=dilations or [1] * rank)
    pad = (pad or [0] * 2 * rank) if pad_type.lower() == "custom" else [0] * 2 * rank
    edges: list[int] = []
    for axis, reached in enumerate(y.shape[2:]):
        before, after = -pad[2 * axis], -pad[2 * axis + 1]
        if output_shape is not None:
            target = output_shape[2 + axis]
        elif pad_type.lower() == "same":
            target = x.shape[2 + axis] * strides[axis]
        else:
            target = reached + before + after
        if pad_type.lower() == "same":
            before = -(max(0, reached - target) // 2)
        edges += [before, target - reached - before]
    y = functional.pad(y, last_first(edges))
    return y if bias is None else y + bias.reshape([-1] + [1] * rank)


def last_first(edges: list[int]) -> list[int]:
    """Padding before and after each axis in torch's order: the last axis first."""
    axes = reversed(range(len(edges) // 2))
    return [edges[2 * axis + side] for axis in axes for side in (0, 1)]


def implied_padding(
    pad_type: str,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: list[int],
    dilations: list[int],
) -> list[int]:
    """The padding before and after each spatial axis. "same" makes the output ceil(size / stride)
    long and puts an odd element after the axis; "same_lower" puts it before."""
    pad_type = pad_type.lower()
    if pad_type == "valid":
        return [0] * 2 * len(sizes)
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"unknown pad_type {pad_type!r}")
    edges: list[int] = []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (taps - 1) * dilation + 1
        total = max(0, (math.ceil(size / stride) - 1) * stride + reach - size)
        small, large = total // 2, total - total // 2
        edges += [small, large] if pad_type == "same" else [large, small]
    return edges
