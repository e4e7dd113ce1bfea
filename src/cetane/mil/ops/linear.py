"""Products: matrices, convolutions, attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from cetane.mil.ops.registry import Tensors, op


@op("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.mT
    return y if bias is None else y + bias


@op("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    if transpose_x and x.ndim > 1:
        x = x.mT
    if transpose_y and y.ndim > 1:
        y = y.mT
    return x @ y


@op("einsum")
def einsum(values: Tensors, equation: str) -> Tensor:
    return torch.einsum(equation, *values)


@op("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value


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
    if pad_type == "custom":
        edges = pad or [0] * 2 * rank
    else:
        edges = _implied_padding(pad_type, x.shape[2:], weight.shape[2:], strides, dilations)
    # torch lists the last dimension first.
    before_after = [edges[2 * axis + side] for axis in reversed(range(rank)) for side in (0, 1)]
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return convolve(functional.pad(x, before_after), weight, bias, strides, 0, dilations, groups)


def _implied_padding(
    pad_type: str,
    sizes: torch.Size,
    kernel: torch.Size,
    strides: list[int],
    dilations: list[int],
) -> list[int]:
    """Before and after each spatial axis. "same" makes the output ceil(size / stride) long and puts
    an odd element after, "same_lower" puts it before."""
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
