"""Products: matrices, convolutions, attention."""

import math
from typing import Any

from cetane.mil.fast.context import ROWS_LINEAR
from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import Tensors, translates


@translates("linear")
def linear(g: OnnxGraph, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    y = g("MatMul", x, g("Transpose", weight, perm=[1, 0]))
    return y if bias is None else g("Add", y, bias)


@translates(ROWS_LINEAR)
def rows_linear(g: OnnxGraph, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """Not an op of MIL: `rows` makes it of a convolution. `weight` is `(K, N)`, already
    transposed: if the graph did that, it would hold the weight twice."""
    y = g("MatMul", x, weight)
    return y if bias is None else g("Add", y, bias)


@translates("matmul")
def matmul(
    g: OnnxGraph, x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False
) -> str:
    return g(
        "MatMul",
        _transposed(g, x) if transpose_x and x.rank > 1 else x,
        _transposed(g, y) if transpose_y and y.rank > 1 else y,
    )


@translates("einsum")
def einsum(g: OnnxGraph, values: Tensors, equation: str) -> str:
    return g("Einsum", *values, equation=equation)


@translates("scaled_dot_product_attention")
def scaled_dot_product_attention(
    g: OnnxGraph, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> str:
    width = query.shape[-1]
    if not isinstance(width, int):
        raise ValueError("the width of a head must be fixed")
    scores = g("Div", g("MatMul", query, _transposed(g, key)), g.floats(math.sqrt(width)))
    if attn_mask is not None:
        if attn_mask.dtype == "bool":
            scores = g("Where", attn_mask, scores, g.floats(-math.inf))
        else:
            scores = g("Add", scores, attn_mask)
    return g("MatMul", g("Softmax", scores, axis=-1), value)


@translates("conv")
def conv(
    g: OnnxGraph,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> str:
    """Convolutions of width 1 stay convolutions too: onnxruntime stores their weights in blocks.
    For one token, it was measured to read these at 28 GB/s, and matrices at 21 GB/s."""
    rank = x.rank - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    padding: dict[str, str | list[int]]
    match pad_type:
        case "valid":
            padding = {"pads": [0] * 2 * rank}
        case "custom":
            edges = pad or [0] * 2 * rank
            padding = {"pads": [*edges[::2], *edges[1::2]]}
        case "same" | "same_lower":
            if any(dilation != 1 for dilation in dilations):
                padding = {"pads": _implied(pad_type, weight.shape[2:], strides, dilations)}
            else:
                padding = {"auto_pad": "SAME_UPPER" if pad_type == "same" else "SAME_LOWER"}
        case _:
            raise ValueError(f"unknown pad_type {pad_type!r}")
    return g(
        "Conv",
        *((x, weight) if bias is None else (x, weight, bias)),
        kernel_shape=list(weight.shape[2:]),
        strides=strides,
        dilations=dilations,
        group=groups,
        **padding,
    )


def _implied(
    pad_type: str, kernel: tuple[Any, ...], strides: list[int], dilations: list[int]
) -> list[int]:
    """The padding that keeps every size. onnxruntime implies none beside dilations."""
    if any(step != 1 for step in strides):
        raise ValueError("implied padding with dilations and strides is not supported")
    total = [(taps - 1) * by for taps, by in zip(kernel, dilations, strict=True)]
    small, large = [n // 2 for n in total], [n - n // 2 for n in total]
    return small + large if pad_type == "same" else large + small


def _transposed(g: OnnxGraph, x: Tensor) -> str:
    *batch, rows, columns = range(x.rank)
    return g("Transpose", x, perm=[*batch, columns, rows])
