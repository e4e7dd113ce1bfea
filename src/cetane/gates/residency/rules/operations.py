"""Rules about convolutions, projections, matrix products and ops of other kinds."""

from math import prod

from cetane.gates.residency.graph import Graph
from cetane.gates.residency.rule import on_op
from cetane.hardware.notch import on_notch
from cetane.mil.program import Argument, Op

DEEPEST = 16_384
"""The most products of one sum on the ANE."""
LONGEST_KERNEL = 13
"""The longest side of a convolution kernel that the compiler takes."""
FUSED_ATTENTION = 2_000_000
"""The elements of Q, K and V from which fused attention was seen on the ANE."""
SCATTER_TOKENS = (8, 32)
"""The fewest and the most tokens of a call that was reported to fail when it writes into a cache by
a matrix product."""


@on_op("reduction-depth")
def reduction_depth(op: Op, graph: Graph) -> str | None:
    depth = graph.depth(op) if graph.matrix(op) is not None else 0
    return f"{op.kind} over {depth}" if depth > DEEPEST else None


@on_op("rank-2-linear")
def rank_2_linear(op: Op, graph: Graph) -> str | None:
    shape = graph.shape(graph.argument(op, "x"))
    return f"{shape}" if op.kind == "linear" and len(shape) == 2 else None


def is_depthwise(op: Op, graph: Graph) -> bool:
    if op.kind != "conv":
        return False
    shape = graph.shape(graph.argument(op, "x"))
    groups = graph.number(op, "groups", 1)
    return len(shape) > 1 and groups > 1 and groups == shape[1]


@on_op("depthwise-conv")
def depthwise_conv(op: Op, graph: Graph) -> str | None:
    channels = graph.output_shape(op)[1:2]
    return f"{channels[0]} channels" if is_depthwise(op, graph) else None


@on_op("palettized-depthwise-conv")
def palettized_depthwise_conv(op: Op, graph: Graph) -> str | None:
    weight = graph.matrix(op)
    four = weight is not None and weight.encoding == "lut" and weight.bits == 4
    return "a 4-bit palette" if four and is_depthwise(op, graph) else None


@on_op("large-kernel")
def large_kernel(op: Op, graph: Graph) -> str | None:
    kernel = graph.shape(graph.argument(op, "weight"))[2:] if op.kind == "conv" else ()
    return f"a kernel of {kernel}" if kernel and max(kernel) > LONGEST_KERNEL else None


@on_op("runtime-weights")
def runtime_weights(op: Op, graph: Graph) -> str | None:
    return op.name if op.kind == "conv" and graph.matrix(op) is None else None


@on_op("small-sdpa")
def small_sdpa(op: Op, graph: Graph) -> str | None:
    if op.kind != "scaled_dot_product_attention":
        return None
    sizes = [prod(graph.shape(graph.argument(op, name))) for name in ("query", "key", "value")]
    return f"{min(sizes)} elements" if min(sizes) < FUSED_ATTENTION else None


@on_op("recurrent")
def recurrent(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind in ("lstm", "gru", "rnn") else None


@on_op("matmul-scatter")
def matmul_scatter(op: Op, graph: Graph) -> str | None:
    low, high = SCATTER_TOKENS
    return scattered(op, graph) if low <= graph.depth(op) <= high else None


@on_op("wide-matmul-scatter")
def wide_matmul_scatter(op: Op, graph: Graph) -> str | None:
    return scattered(op, graph) if graph.depth(op) > SCATTER_TOKENS[1] else None


def scattered(op: Op, graph: Graph) -> str | None:
    """The columns that a matrix product writes into a cache, in words; None for other ops.

    Such a product is added to an input or a state that is multiplied by a mask. Shapes alone do not
    tell it: attention's products have the same."""
    if op.kind != "matmul" or graph.matrix(op) is not None:
        return None
    sums = [user for user in graph.users(op) if user.kind == "add"]
    kept = [m for user in sums for m in graph.makers(user) if m.kind == "mul"]
    if not any(is_given(graph.argument(mul, name), graph) for mul in kept for name in ("x", "y")):
        return None
    return f"{graph.output_shape(op)} from {graph.depth(op)} columns"


def is_given(argument: Argument | None, graph: Graph) -> bool:
    """Whether a value is an input or a state, or a slice of one."""
    op = graph.maker(argument) if argument is not None else None
    if op is None:
        return argument in graph.function.inputs
    return op.kind == "read_state" or (
        op.kind == "slice_by_index" and is_given(graph.argument(op, "x"), graph)
    )


@on_op("activation-quantization")
@on_op("activation-quantization-mac")
def activation_quantization(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind in ("quantize", "dequantize") else None


@on_op("quantized-product")
def quantized_product(op: Op, graph: Graph) -> str | None:
    makers = graph.makers(op)
    both = len(makers) == 2 and all(maker.kind == "dequantize" for maker in makers)
    return "both factors" if op.kind == "mul" and both else None


@on_op("contraction-notch")
def contraction_notch(op: Op, graph: Graph) -> str | None:
    weight = graph.matrix(op)
    if weight is None or op.kind not in ("conv", "linear"):
        return None
    outputs, contracted = weight.shape[0], prod(weight.shape[1:])
    if not on_notch(outputs, contracted, weight.bits):
        return None
    guessed = "" if weight.bits == 16 else ", where the formula is a guess"
    return f"{outputs} x {contracted} of {weight.bits} bits{guessed}"


@on_op("loop")
def loop(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind == "while_loop" else None
