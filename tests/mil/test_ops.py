"""Every op of the table against numpy, on every executor."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb
from tests.mil.programs import retyped

from cetane.errors import CetaneError
from cetane.mil import MilFunction, Program, load
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram
from cetane.mil.fast.ops import TRANSLATIONS
from cetane.mil.fast.tape.model import TapeModel
from cetane.mil.fast.tape.ops import INSTRUCTIONS
from cetane.mil.ops import OPS
from cetane.mil.validate import check_function

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return rng.uniform(0.1, 2.0, shape).astype(np.float32)


def integers(low: int, high: int, *shape: int) -> np.ndarray:
    return rng.integers(low, high, shape).astype(np.int32)


def bits(*shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(bool)


@dataclass
class Case:
    """Tensor inputs, constant parameters and the expected output(s) of one use of an op."""

    op: str
    inputs: dict[str, Any]
    expected: Any
    params: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        details = [f"{k}={v}" for k, v in self.params.items() if not isinstance(v, np.ndarray)]
        return "-".join([self.op, *details])[:80]


def unary(
    op: str, function: Callable[..., Any], x: np.ndarray | None = None, **params: Any
) -> Case:
    x = normal(3, 4) if x is None else x
    return Case(op, {"x": x}, function(x), params)


def binary(op: str, function: Callable[..., Any], x: np.ndarray, y: np.ndarray) -> Case:
    return Case(op, {"x": x, "y": y}, function(x, y))


def each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.vectorize(function)(x.astype(np.float64))


UNIT = rng.uniform(-0.9, 0.9, (3, 4)).astype(np.float32)
HALVES = np.array([[-2.5, -1.5, -0.5, 0.5], [1.5, 2.5, 2.4, -0.6]], np.float32)
BEYOND = np.array([-np.inf, -3e9, -(2.0**31), 2.0**31 - 128, 2.0**31, np.inf, np.nan], np.float32)
LIMITS = [-(2**31)] * 3 + [2**31 - 128] + [2**31 - 1] * 2 + [0]
A, B = normal(2, 3, 4), normal(3, 1)
N, D = integers(-9, 9, 3, 4), integers(1, 5, 4)

ELEMENTWISE = [
    unary("abs", np.abs),
    unary("abs", np.abs, N),
    unary("acos", np.arccos, UNIT),
    unary("asin", np.arcsin, UNIT),
    unary("atan", np.arctan),
    unary("atanh", np.arctanh, UNIT),
    unary("ceil", np.ceil, HALVES),
    unary("cos", np.cos),
    unary("cosh", np.cosh),
    unary("erf", each(math.erf)),
    unary("exp", np.exp),
    unary("exp2", np.exp2),
    unary("floor", np.floor, HALVES),
    unary("logical_not", np.logical_not, bits(3, 4)),
    unary("round", np.round, HALVES),
    unary("sign", np.sign, np.array([-2.0, 0.0, 3.0], np.float32)),
    unary("sin", np.sin),
    unary("sinh", np.sinh),
    unary("sqrt", np.sqrt, positive(3, 4)),
    unary("square", np.square),
    unary("tan", np.tan, UNIT),
    unary("tanh", np.tanh),
    unary("inverse", lambda x: 1 / (x + 0.5), positive(3, 4), epsilon=0.5),
    unary("log", np.log, positive(3, 4)),
    unary("log", lambda x: np.log(x + 0.5), positive(3, 4), epsilon=0.5),
    unary("rsqrt", lambda x: (x + 0.5) ** -0.5, positive(3, 4), epsilon=0.5),
    unary("clip", lambda x: np.clip(x, -0.5, 0.25), alpha=-0.5, beta=0.25),
    unary("threshold", lambda x: np.maximum(x, 0.1), alpha=0.1),
    unary("cast", np.trunc, HALVES, dtype="int32"),
    unary("cast", lambda _: np.array(LIMITS), BEYOND, dtype="int32"),
    unary("cast", lambda x: x != 0, N, dtype="bool"),
    unary("cast", lambda x: x, N, dtype="fp32"),
    binary("add", np.add, A, B),
    binary("sub", np.subtract, N, D),
    binary("mul", np.multiply, A, B),
    binary("real_div", np.divide, A, positive(4)),
    binary("floor_div", np.floor_divide, N, D),
    binary("floor_div", np.floor_divide, A, positive(4)),
    binary("mod", np.mod, N, -D),
    binary("mod", np.mod, A, positive(4)),
    binary("pow", np.power, positive(3, 4), normal(4)),
    binary("maximum", np.maximum, A, B),
    binary("minimum", np.minimum, N, D),
    binary("equal", np.equal, N, N.T.reshape(3, 4)),
    binary("not_equal", np.not_equal, N, N.T.reshape(3, 4)),
    binary("less", np.less, A, B),
    binary("less_equal", np.less_equal, N, D),
    binary("greater", np.greater, A, B),
    binary("greater_equal", np.greater_equal, N, D),
    binary("logical_and", np.logical_and, bits(3, 4), bits(4)),
    binary("logical_or", np.logical_or, bits(3, 4), bits(4)),
    binary("logical_xor", np.logical_xor, bits(3, 4), bits(4)),
]

QUANTIZED = integers(-100, 100, 2, 3).astype(np.int8)
STEP, ZERO = np.array([0.1, 0.2, 0.3], np.float32), np.array([1, -2, 3], np.int8)
ELEMENTWISE += [
    Case(
        "quantize",
        {"input": 20 * normal(2, 3)},
        lambda input: np.clip(np.round(input / STEP) + ZERO, -128, 127),
        {"scale": STEP, "zero_point": ZERO, "axis": 1, "output_dtype": "int8"},
    ),
    Case(
        "quantize",
        {"input": 20 * normal(2, 3)},
        lambda input: np.clip(np.round(input / np.float32(0.5)), 0, 255),
        {"scale": np.float32(0.5), "output_dtype": "uint8"},
    ),
    Case(
        "dequantize",
        {"input": QUANTIZED},
        (QUANTIZED.astype(np.float32) - ZERO) * STEP,
        {"scale": STEP, "zero_point": ZERO, "axis": -1},
    ),
]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


ACTIVATION = [
    unary("relu", lambda x: np.maximum(x, 0)),
    unary("relu6", lambda x: np.clip(x, 0, 6), 5 * normal(3, 4)),
    unary("leaky_relu", lambda x: np.where(x < 0, 0.1 * x, x), alpha=0.1),
    unary("sigmoid", logistic),
    unary("silu", lambda x: x * logistic(x)),
    unary("softplus", lambda x: np.log1p(np.exp(x))),
    unary("gelu", each(lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))), mode="EXACT"),
    unary(
        "gelu",
        each(lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        mode="TANH_APPROXIMATION",
    ),
    unary("gelu", lambda x: x * logistic(1.702 * x), mode="SIGMOID_APPROXIMATION"),
    unary("softmax", softmax),
    unary("softmax", lambda x: softmax(x, 1), A, axis=1),
]

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
    "reduce_l1_norm": lambda x, **at: np.sum(np.abs(x), **at),
    "reduce_l2_norm": lambda x, **at: np.sqrt(np.sum(x * x, **at)),
    "reduce_sum_square": lambda x, **at: np.sum(x * x, **at),
    "reduce_log_sum": lambda x, **at: np.log(np.sum(x, **at)),
    "reduce_log_sum_exp": lambda x, **at: np.log(np.sum(np.exp(x), **at)),
}
P = positive(2, 3, 4)
DISTINCT = rng.permutation(24).reshape(2, 3, 4).astype(np.float32)
ORDER = np.argsort(-DISTINCT, 1)
TIES = np.array([[1, 3, 3, 2], [0, 0, 0, 0]], np.float32)

REDUCTION = [
    case
    for op, function in REDUCTIONS.items()
    for case in (
        Case(op, {"x": P}, function(P, axis=(0, 2)), {"axes": [0, -1]}),
        Case(op, {"x": P}, function(P, axis=(1,), keepdims=True), {"axes": [1], "keep_dims": True}),
        Case(op, {"x": P}, function(P, axis=None, keepdims=True), {"keep_dims": True}),
    )
] + [
    Case("reduce_sum", {"x": N}, N.sum(1), {"axes": [1]}),
    Case("reduce_argmax", {"x": DISTINCT}, DISTINCT.argmax(1), {"axis": 1}),
    Case("reduce_argmin", {"x": DISTINCT}, DISTINCT.argmin(-1, keepdims=True), {"keep_dims": True}),
    Case("cumsum", {"x": A}, A.cumsum(1), {"axis": 1}),
    Case("cumsum", {"x": N}, N[::-1].cumsum(0)[::-1], {"axis": 0, "reverse": True}),
    Case("cumsum", {"x": N}, N.cumsum(1) - N, {"axis": 1, "exclusive": True}),
    Case("argsort", {"x": DISTINCT}, ORDER, {"axis": 1}),
    Case("argsort", {"x": DISTINCT}, DISTINCT.argsort(-1), {"ascending": True}),
    Case(
        "topk",
        {"x": DISTINCT},
        (-np.sort(-DISTINCT, 1)[:, :2], ORDER[:, :2]),
        {"k": 2, "axis": 1},
    ),
    Case("topk", {"x": TIES}, ([[1, 2], [0, 0]], [[0, 3], [0, 1]]), {"k": 2, "ascending": True}),
    Case("topk", {"x": TIES}, [[3], [0]], {"k": 1, "return_indices": False}),
]


def naive_conv(
    x: np.ndarray,
    weight: np.ndarray,
    edges: list[tuple[int, int]],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int = 1,
) -> np.ndarray:
    """Convolution from its definition, a sum over taps, for any number of spatial axes."""
    x = np.pad(x, [(0, 0), (0, 0), *edges])
    kernel = weight.shape[2:]
    size = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True)
    ]
    out = np.zeros((x.shape[0], weight.shape[0], *size))
    per_in, per_out = weight.shape[1], weight.shape[0] // groups
    for group in range(groups):
        into = slice(group * per_out, (group + 1) * per_out)
        channels = x[:, group * per_in : (group + 1) * per_in]
        for tap in np.ndindex(*kernel):
            window = tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, n, s in zip(tap, dilations, size, strides, strict=True)
            )
            part = weight[(into, slice(None), *tap)]
            out[:, into] += np.einsum("nc...,oc->no...", channels[(..., *window)], part)
    return out


Q, K, V = normal(1, 2, 3, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 6)
SCORES = Q @ K.swapaxes(-1, -2) / 2
FLOAT_MASK, BOOL_MASK = normal(3, 5), np.tri(3, 5, 2).astype(bool)
X1, W1, X2, W2 = normal(1, 4, 9), normal(6, 2, 3), normal(2, 3, 7, 8), normal(4, 3, 3, 2)
BIAS, SCALE = normal(6), positive(6)
WQ1, WQ2 = integers(0, 256, 6, 2, 3).astype(np.uint8), integers(0, 16, 4, 3, 3, 2).astype(np.uint8)

LINEAR = [
    Case(
        "linear", {"x": A}, A @ W2[0, 0, :1].repeat(2, 1).T, {"weight": W2[0, 0, :1].repeat(2, 1)}
    ),
    Case(
        "linear",
        {"x": normal(2, 4)},
        lambda x: x @ P[0].T + D[:3],
        {"weight": P[0], "bias": D[:3].astype(np.float32)},
    ),
    binary("matmul", np.matmul, normal(2, 1, 3, 4), normal(5, 4, 2)),
    binary("matmul", np.matmul, normal(4), normal(4, 2)),
    Case(
        "matmul",
        {"x": normal(2, 4, 3), "y": normal(5, 4)},
        lambda x, y: x.swapaxes(-1, -2) @ y.T,
        {"transpose_x": True, "transpose_y": True},
    ),
    Case(
        "einsum",
        {"values": [normal(2, 3, 1, 4), normal(2, 4, 5, 6)]},
        lambda values: np.einsum("nchw,nwhu->nchu", values[0].repeat(5, 2), values[1]),
        {"equation": "nchw,nwhu->nchu"},
    ),
    Case("scaled_dot_product_attention", {"query": Q, "key": K, "value": V}, softmax(SCORES) @ V),
    Case(
        "scaled_dot_product_attention",
        {"query": Q, "key": K, "value": V, "attn_mask": FLOAT_MASK},
        softmax(SCORES + FLOAT_MASK) @ V,
    ),
    Case(
        "scaled_dot_product_attention",
        {"query": Q, "key": K, "value": V, "attn_mask": BOOL_MASK},
        softmax(np.where(BOOL_MASK, SCORES, -np.inf)) @ V,
    ),
    Case("conv", {"x": X2}, naive_conv(X2, W2, [(0, 0)] * 2, (1, 1), (1, 1)), {"weight": W2}),
    Case(
        "conv",
        {"x": X1},
        naive_conv(X1, W1, [(2, 1)], (2,), (1,), 2) + BIAS[:, None],
        {
            "weight": W1,
            "bias": BIAS,
            "groups": 2,
            "strides": [2],
            "pad_type": "custom",
            "pad": [2, 1],
        },
    ),
    Case(  # 7 -> 4 needs 0 + 2 * 3 + 3 - 7 = 2, 8 -> 8 needs 2 - 1 = 1, after
        "conv",
        {"x": X2},
        naive_conv(X2, W2, [(1, 1), (0, 1)], (2, 1), (1, 1)),
        {"weight": W2, "pad_type": "same", "strides": [2, 1]},
    ),
    Case(
        "conv",
        {"x": X2},
        naive_conv(X2, W2, [(2, 2), (2, 1)], (1, 1), (2, 3)),
        {"weight": W2, "pad_type": "same_lower", "dilations": [2, 3]},
    ),
    Case(  # one scale for all
        "conv_quantized",
        {"x": X2},
        naive_conv(X2, WQ2 * 0.5 - 3, [(0, 0)] * 2, (1, 1), (1, 1)),
        {
            "weight": WQ2,
            "quantization_type": "linear",
            "quant_scale": np.float32(0.5),
            "quant_bias": np.float32(-3),
        },
    ),
    Case(  # one for each output channel; coremltools wants the bias in the type of the weight
        "conv_quantized",
        {"x": X1},
        naive_conv(X1, WQ1 * SCALE[:, None, None] + BIAS[:, None, None], [(2, 1)], (2,), (1,), 2)
        + np.arange(6)[:, None],
        {
            "weight": WQ1,
            "quantization_type": "linear",
            "quant_scale": SCALE,
            "quant_bias": BIAS,
            "bias": np.arange(6, dtype=np.uint8),
            "groups": 2,
            "strides": [2],
            "pad_type": "custom",
            "pad": [2, 1],
        },
    ),
]

GAMMA, BETA, MEAN, VARIANCE = normal(3), normal(3), normal(3), positive(3)


def standardized(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


NORMALIZATION = [
    unary("layer_norm", lambda x: standardized(x, (2,), 1e-5), A, axes=[-1]),
    Case(
        "layer_norm",
        {"x": A},
        standardized(A, (1,), 0.1) * GAMMA[:, None] + BETA[:, None],
        {"axes": [1], "gamma": GAMMA, "beta": BETA, "epsilon": 0.1},
    ),
    unary(
        "layer_norm",
        lambda x: standardized(x, (1, 2), 1e-5) * P[0],
        A,
        axes=[1, 2],
        gamma=P[0],
        beta=np.zeros((3, 4), np.float32),
    ),
    Case(
        "batch_norm",
        {"x": A},
        (A - MEAN[:, None]) / np.sqrt(VARIANCE + 1e-3)[:, None] * GAMMA[:, None] + BETA[:, None],
        {"mean": MEAN, "variance": VARIANCE, "gamma": GAMMA, "beta": BETA, "epsilon": 1e-3},
    ),
    Case(
        "instance_norm",
        {"x": A},
        standardized(A, (2,), 1e-3) * GAMMA[:, None] + BETA[:, None],
        {"gamma": GAMMA, "beta": BETA, "epsilon": 1e-3},
    ),
    unary(
        "l2_norm",
        lambda x: x / np.sqrt((x**2).sum((1, 2, 3), keepdims=True) + 1e-3),
        normal(2, 3, 4, 5),
        epsilon=1e-3,
    ),
]

SHAPE = [
    unary("identity", lambda x: x),
    unary("shape", lambda x: [3, 4]),
    unary("reshape", lambda x: x.reshape(2, 4, 3), A, shape=[0, -1, 3]),
    unary("reshape", lambda x: x.reshape(6, 4), A, shape=[6, 4]),
    Case(
        "reshape_like",
        {"x": normal(24), "ref_tensors": [A, normal(9, 4)]},
        lambda x, ref_tensors: x.reshape(2, 3, 4),
        {"begins": (0, 1), "ends": (2, 0), "end_masks": (False, True)},
    ),
    unary("expand_dims", lambda x: x.reshape(1, 3, 4, 1), axes=[0, -1]),
    unary("squeeze", lambda x: x.reshape(3, 1), normal(1, 3, 1), axes=[0]),
    unary("squeeze", lambda x: x.reshape(3), normal(1, 3, 1)),
    unary("flatten2d", lambda x: x.reshape(6, 4), A, axis=-1),
    unary("transpose", lambda x: x.transpose(2, 0, 1), A, perm=[-1, 0, 1]),
    unary("reverse", lambda x: x[::-1, :, ::-1], A, axes=[0, 2]),
    unary("tile", lambda x: np.tile(x, (2, 1, 3)), A, reps=[2, 1, 3]),
    Case("concat", {"values": [A, P]}, np.concatenate([A, P], 1), {"axis": 1}),
    Case("concat", {"values": [A]}, A, {"axis": 1}),
    Case("concat", {"values": [N, N[:1]]}, np.concatenate([N, N[:1]]), {"axis": -2}),
    Case(
        "concat",
        {"values": [A, P]},
        np.stack([A, P], 2).reshape(2, 6, 4),
        {"axis": 1, "interleave": True},
    ),
    Case("stack", {"values": [A, P]}, np.stack([A, P], -1), {"axis": -1}),
    unary("split", lambda x: np.split(x, 2, 2), A, num_splits=2, axis=2),
    unary("split", lambda x: np.split(x, [1], 1), A, split_sizes=[1, 2], axis=1),
]

UPDATE = normal(1, 2)
UPDATED = A.copy()
UPDATED[1:2, 0, 2:0:-1] = UPDATE
PART, WITH_PART = normal(1, 2), A.copy()
WITH_PART[1:2, -2, ::3] = PART

SLICING = [
    unary(
        "slice_by_index",
        lambda x: x[0:2, 1:3, 0:4:3],
        A,
        begin=[0, 1, 0],
        end=[2, 3, 4],
        stride=[1, 1, 3],
    ),
    unary(
        "slice_by_index",
        lambda x: x[:, -2:-1],
        A,
        begin=[1, -2, 0],
        end=[1, -1, 1],
        begin_mask=[True, False, False],
        end_mask=[True, False, True],
    ),
    unary(
        "slice_by_index",
        lambda x: x[:, -1, 1],
        A,
        begin=[0, -1, 1],
        end=[2, 0, 0],
        squeeze_mask=[False, True, True],
    ),
    unary(
        "slice_by_index",
        lambda x: x[:, ::-1, 3:0:-2],
        A,
        begin=[0, 0, 3],
        end=[2, 0, 0],
        stride=[1, -1, -2],
        begin_mask=[False, True, False],
        end_mask=[False, True, False],
    ),
    unary("slice_by_size", lambda x: x[1:2, 1:3, 2:], A, begin=[1, -2, 2], size=[1, 2, -1]),
    Case(
        "slice_update",
        {"x": A, "update": PART},
        WITH_PART,
        {
            "begin": [1, -2, 0],
            "end": [2, 0, 0],
            "stride": [1, 5, 3],
            "squeeze_mask": [False, True, False],
            "begin_mask": [False, False, True],
            "end_mask": [False, False, True],
        },
    ),
    Case(
        "slice_update",
        {"x": A, "update": UPDATE},
        UPDATED,
        {
            "begin": [1, 0, 2],
            "end": [2, 1, 0],
            "stride": [1, 1, -1],
            "squeeze_mask": [False, True, False],
        },
    ),
    unary(
        "pad",
        lambda x: np.pad(x, [(0, 0), (1, 2), (0, 3)], constant_values=7),
        A,
        pad=[1, 2, 0, 3],
        constant_val=7.0,
    ),
    unary(
        "pad",
        lambda x: np.pad(x, [(0, 0), (2, 1), (3, 0)], mode="reflect"),
        A,
        pad=[2, 1, 3, 0],
        mode="reflect",
    ),
    unary(
        "pad",
        lambda x: np.pad(x, [(1, 0), (2, 1), (3, 0)], mode="edge"),
        A,
        pad=[1, 0, 2, 1, 3, 0],
        mode="replicate",
    ),
]

ROWS, PICK = np.array([[0, 1], [1, 1]], np.int32), np.array([2, 0], np.int32)
ALONG = integers(0, 3, 2, 3, 4)
TWICE = np.array([0, 2, 0], np.int32)
PATCH, PLACES = positive(2, 3), np.array([[0, 1], [1, 2], [0, 1]], np.int32)


def scattered(data: np.ndarray, mode: str, axis: int, updates: np.ndarray) -> np.ndarray:
    """Write the slices of `updates` at TWICE along an axis, one after another."""
    out = np.moveaxis(data.copy(), axis, 0)
    apply = {
        "update": lambda old, new: new,
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
    }[mode]
    for place, value in zip(TWICE, np.moveaxis(updates, axis, 0), strict=True):
        out[place] = apply(out[place], value)
    return np.moveaxis(out, 0, axis)


ADDED = PATCH.copy()
for place, value in zip(PLACES, (1.0, 2.0, 3.0), strict=True):
    ADDED[tuple(place)] += np.float32(value)

GATHER = [
    Case("gather", {"x": A, "indices": PICK}, A[:, PICK], {"axis": 1}),
    Case("gather", {"x": A, "indices": ROWS}, A[..., ROWS], {"axis": -1}),
    Case("gather", {"x": A}, A[1], {"indices": np.int32(1), "axis": 0}),
    Case("gather", {"x": BIAS}, BIAS[2], {"indices": np.int32(2)}),
    Case(
        "gather",
        {"x": A, "indices": ROWS},
        np.stack([A[b][:, ROWS[b]] for b in range(2)]),
        {"axis": 2, "batch_dims": 1},
    ),
    Case(
        "gather",
        {"x": A, "indices": PICK},
        np.stack([A[b, PICK[b]] for b in range(2)]),
        {"axis": 1, "batch_dims": 1},
    ),
    Case(
        "gather_along_axis",
        {"x": A, "indices": ALONG},
        np.take_along_axis(A, ALONG, 1),
        {"axis": 1},
    ),
    Case("gather_nd", {"x": A, "indices": ROWS}, A[ROWS[:, 0], ROWS[:, 1]], {}),
    Case(
        "gather_nd",
        {"x": A, "indices": ROWS},
        np.stack([A[b][tuple(ROWS[b])] for b in range(2)]),
        {"batch_dims": 1},
    ),
    *(
        Case(
            "scatter",
            {"data": PATCH, "indices": TWICE, "updates": updates},
            scattered(PATCH, mode, 1, updates),
            {"axis": 1, "mode": mode},
        )
        for mode in ("add", "sub", "mul", "div", "max", "min")
        for updates in (positive(2, 3),)
    ),
    Case(
        "scatter",
        {"data": PATCH, "indices": PICK, "updates": positive(2, 2)},
        lambda data, indices, updates: np.stack([updates[:, 1], data[:, 1], updates[:, 0]], 1),
        {"axis": 1, "mode": "update"},
    ),
    Case(
        "scatter_along_axis",
        {"data": PATCH, "indices": np.array([[2], [0]], np.int32), "updates": positive(2, 1)},
        lambda data, indices, updates: np.array(
            [[*data[0, :2], updates[0, 0]], [updates[1, 0], *data[1, 1:]]]
        ),
        {"axis": 1, "mode": "update"},
    ),
    Case(
        "scatter_nd",
        {"data": PATCH, "indices": PLACES, "updates": np.array([1, 2, 3], np.float32)},
        ADDED,
        {"mode": "add"},
    ),
]

TENSOR = [
    Case("fill", {"shape": np.array([2, 3], np.int32)}, np.full((2, 3), 1.5), {"value": 1.5}),
    Case("fill_like", {"ref_tensor": A}, np.full(A.shape, 2), {"value": 2}),
    Case("range_1d", {}, np.arange(1, 8, 3), {"start": 1, "end": 8, "step": 3}),
    Case("one_hot", {"indices": ROWS}, np.eye(3)[ROWS], {"one_hot_vector_size": 3}),
    Case(
        "one_hot",
        {"indices": ROWS},
        np.moveaxis(np.eye(3)[ROWS], -1, 1) * 3 - 1,
        {"one_hot_vector_size": 3, "axis": 1, "on_value": 2.0, "off_value": -1.0},
    ),
    unary("band_part", lambda x: np.tril(np.triu(x, -1), 2), normal(2, 5, 6), lower=1, upper=2),
    unary("band_part", np.tril, normal(5, 6), lower=-1, upper=0),
    unary("non_zero", lambda x: np.argwhere(x), bits(3, 4)),
    Case(
        "select",
        {"cond": bits(3, 1), "a": P, "b": A},
        lambda cond, a, b: np.where(cond, a, b),
    ),
]

CASES = [
    *ELEMENTWISE,
    *ACTIVATION,
    *REDUCTION,
    *LINEAR,
    *NORMALIZATION,
    *SHAPE,
    *SLICING,
    *GATHER,
    *TENSOR,
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case: Case, build: Callable[..., Any]) -> None:
    """One package on all executors, since coremltools takes longer to write it than they to run."""
    function, fed = written(case, build)
    for place, other in retyped(function):
        with pytest.raises(CetaneError, match=r"it computes|is passed"):
            check_function(other)
            raise AssertionError(f"{place} was not compared")
    agrees(case, "reference", Executable(function, "fp32")(fed))

    program = Program(Path(), {"main": function})
    if lacks_translation(case):
        with pytest.raises(CetaneError, match=case.op):
            FastProgram(program).function("main")(fed)
    else:
        agrees(case, "graph", FastProgram(program).function("main")(fed))

    if case.op in INSTRUCTIONS:
        tapes = TapeModel(program)
        if "main" in tapes.tapes:  # other forms of these ops run on onnxruntime
            agrees(case, "tape", tapes.function("main")(fed))


def written(case: Case, build: Callable[..., Any]) -> tuple[MilFunction, dict[str, np.ndarray]]:
    """The case as a function of a package, and the function's inputs."""
    arrays: dict[str, np.ndarray] = {}
    for name, given in case.inputs.items():
        parts = given if isinstance(given, list) else [given]
        arrays.update({f"{name}_{index}": part for index, part in enumerate(parts)})

    def body(**variables: Any) -> Any:
        arguments = dict(case.params)
        for name, given in case.inputs.items():
            parts = given if isinstance(given, list) else [given]
            used = [
                typed(variables[f"{name}_{index}"], part.dtype) for index, part in enumerate(parts)
            ]
            arguments[name] = used if isinstance(given, list) else used[0]
        results = getattr(mb, case.op)(**arguments)
        return [visible(r) for r in (results if isinstance(results, (tuple, list)) else [results])]

    # A program needs an input even if the op has none.
    shapes = {name: interface(array) for name, array in arrays.items()} or {
        "unused": ((1,), "fp32")
    }
    fed = {name: array.astype(NUMPY[shapes[name][1]]) for name, array in arrays.items()}
    fed = fed or {"unused": np.zeros(1, np.float32)}
    return load(build(shapes, body)).functions["main"], fed


def agrees(case: Case, executor: str, made: Mapping[str, np.ndarray]) -> None:
    """What an executor made is what numpy makes."""
    outputs = list(made.values())
    expected = case.expected(**case.inputs) if callable(case.expected) else case.expected
    expected = list(expected) if isinstance(expected, tuple) or len(outputs) > 1 else [expected]
    assert len(outputs) == len(expected), executor
    for output, truth in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(
            output, truth, rtol=2e-5, atol=2e-6, err_msg=executor, strict=False
        )
        assert output.shape == np.shape(truth), executor


def lacks_translation(case: Case) -> bool:
    """Whether this use of an op is left to the reference executor."""
    return (
        (case.op not in TRANSLATIONS and bool(case.inputs))  # without, it is a constant
        or case.params.get("mode") == "div"
        or (case.op == "slice_update" and min(case.params.get("stride", [1])) < 0)
    )


def test_an_initial_state_with_more_rows_than_the_batch() -> None:
    """coremltools takes the batch of a packed sequence to be as large as its longest member."""
    x, layer = torch.from_numpy(normal(5, 3, 4)), torch.nn.LSTM(4, 6)

    def gates(parameter: torch.Tensor) -> torch.Tensor:
        i, f, z, o = parameter.chunk(4)
        return torch.cat([i, f, o, z])

    with torch.no_grad():
        y, h, c = OPS["lstm"].call(
            x,
            torch.zeros(10, 6),
            torch.zeros(10, 6),
            gates(layer.weight_ih_l0),
            gates(layer.weight_hh_l0),
            gates(layer.bias_ih_l0 + layer.bias_hh_l0),
            output_sequence=True,
        )
        expected, (last_h, last_c) = layer(x)
    for ours, theirs in ((y, expected), (h, last_h[0]), (c, last_c[0])):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert ours.shape == theirs.shape


NUMPY = {"fp32": np.float32, "int32": np.int32}
VIA_CAST = {"bool": "bool", "int8": "int8", "uint8": "uint8"}


def interface(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a program input that carries the array: bool and int8 go as int32."""
    return array.shape, "fp32" if array.dtype.kind == "f" else "int32"


def typed(variable: Any, dtype: np.dtype) -> Any:
    return mb.cast(x=variable, dtype=str(dtype)) if str(dtype) in VIA_CAST else variable


def visible(variable: Any) -> Any:
    """The value in a type that Core ML allows for an output."""
    name = variable.dtype.__type_info__().name
    return mb.cast(x=variable, dtype="int32") if name in VIA_CAST else variable


# Compared by coremltools' own tests, which tests/bridge/test_conformance.py runs.
CONFORMANCE = """
affine avg_pool batch_to_space clamped_relu classify conv_transpose crop crop_resize depth_to_space
elu gru l2_pool linear_activation list_gather list_length list_read list_scatter
list_write local_response_norm lstm make_list max_pool non_maximum_suppression pixel_shuffle
pixel_unshuffle prelu random_bernoulli random_categorical random_normal random_uniform resample
resize resize_bilinear resize_nearest_neighbor reverse_sequence rnn scaled_tanh sigmoid_hard
sliding_windows softplus_parametric softsign space_to_batch space_to_depth thresholded_relu
upsample_bilinear upsample_nearest_neighbor
"""


def test_every_op_has_a_case() -> None:
    elsewhere = {"cond", "while_loop", "read_state", "write_state", *CONFORMANCE.split()}
    tested = {case.op for case in CASES} | elsewhere
    assert {kind for kind in OPS if not kind.startswith("constexpr_")} == tested


def test_every_translation_and_instruction_has_a_case() -> None:
    # These are no ops of MIL: see tests/mil/fast/test_fusion.py.
    kinds = {kind for kind in {*TRANSLATIONS, *INSTRUCTIONS} if not kind.startswith("fast:")}
    assert kinds <= {case.op for case in CASES}
