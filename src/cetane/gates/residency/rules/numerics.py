"""Rules about precision: fp32 islands, infinities, squares and small epsilons."""

from math import prod

import numpy as np

from cetane.gates.residency.graph import LARGEST_VALUE, SHAPE_KINDS, Graph
from cetane.gates.residency.rule import on_function, on_op
from cetane.mil.program import Op, StoredConstant

RIGHT_SOFTPLUS = 10.25
"""The largest input for which the ANE's softplus is right; at 10.4 it was wrong."""
SMALLEST_NORMAL = 6.1e-5
"""The smallest normal fp16 number, 2**-14, rounded down."""
REDUCTIONS = ("reduce_mean", "reduce_sum")
MASKING = ("add", "sub", "select", "where", "mul", "softmax")


def dtypes(op: Op, graph: Graph) -> set[str]:
    """The types of an op's named inputs and its outputs. Literals in the op do not count."""
    read = {
        type_.dtype for arguments in op.inputs.values() for argument in arguments
        if isinstance(argument, str) and (type_ := graph.type(argument)) is not None
    }  # fmt: skip
    return read | {type_.dtype for type_ in graph.output_types(op)}


def at_boundary(op: Op, graph: Graph) -> bool:
    """Whether an op is a cast of an input or to an output of the function."""
    return op.kind == "cast" and (graph.is_output(op) or not graph.makers(op))


@on_op("fp32-island")
def fp32_island(op: Op, graph: Graph) -> str | None:
    return op.kind if "fp32" in dtypes(op, graph) and not at_boundary(op, graph) else None


@on_op("fp32-boundary")
def fp32_boundary(op: Op, graph: Graph) -> str | None:
    return op.name if "fp32" in dtypes(op, graph) and at_boundary(op, graph) else None


@on_op("int8-input")
def int8_input(op: Op, graph: Graph) -> str | None:
    read = [a for given in op.inputs.values() for a in given if isinstance(a, str)]
    if not any(a in graph.function.inputs and graph.dtype(a) == "int8" for a in read):
        return None
    return f"{op.kind} of {', '.join(a for a in read if a in graph.function.inputs)}"


@on_op("infinite-mask")
def infinite_mask(op: Op, graph: Graph) -> str | None:
    if op.kind not in MASKING:
        return None
    for arguments in op.inputs.values():
        for argument in arguments:
            value = graph.constant(argument)
            if value is not None and holds_infinity(value):
                return f"{op.kind} {op.name}"
    return None


def holds_infinity(constant: StoredConstant) -> bool:
    shape = constant.type.static_shape or ()
    if constant.type.dtype not in ("fp16", "fp32") or prod(shape) > LARGEST_VALUE:
        return False
    return bool(np.isinf(constant.numpy()).any())


def squares(op: Op, graph: Graph) -> Op | None:
    """The op that squares the values that a reduction sums, perhaps the reduction itself; None for
    other ops."""
    if op.kind in ("reduce_sum_square", "reduce_l2_norm"):
        return op
    if op.kind not in REDUCTIONS:
        return None
    maker = graph.maker(graph.argument(op, "x") or "")
    if maker is None:
        return None
    power = maker.kind == "pow" and graph.number(maker, "y") in (2, 2.0, [2.0])
    same = maker.kind == "mul" and maker.inputs["x"] == maker.inputs["y"]
    return maker if maker.kind == "square" or power or same else None


@on_op("fp16-squares")
def fp16_squares(op: Op, graph: Graph) -> str | None:
    square = squares(op, graph)
    if square is None or all(type_.dtype != "fp16" for type_ in graph.output_types(op)):
        return None
    scaled = graph.maker(graph.argument(square, "x") or "")
    if scaled is not None and scaled.kind in ("mul", "real_div") and shrinks(scaled, graph):
        return None
    return f"{op.kind} {op.name}"


def shrinks(op: Op, graph: Graph) -> bool:
    """Whether an op multiplies by a number below one, or divides by one above."""
    for name in ("x", "y"):
        value = graph.value(op, name)
        if value is not None and value.size == 1:
            size = abs(float(value.reshape(())))
            return size < 1 if op.kind == "mul" else size > 1 and name == "y"
    return False


@on_function("layer-norm-variance")
def layer_norm_variance(graph: Graph) -> str | None:
    norms = sum(op.kind == "layer_norm" for op in graph.ops)
    return f"{norms} layer_norm" if norms else None


@on_op("subnormal-epsilon")
def subnormal_epsilon(op: Op, graph: Graph) -> str | None:
    if op.kind != "rsqrt" or graph.number(op, "epsilon", 1e-12) >= SMALLEST_NORMAL:
        return None
    maker = graph.maker(graph.argument(op, "x") or "")
    while maker is not None and maker.kind in SHAPE_KINDS:
        maker = graph.maker(graph.argument(maker, "x") or "")
    if maker is None or maker.kind not in ("add", *REDUCTIONS):
        return None
    if maker.kind == "add":
        added = [graph.value(maker, name) for name in ("x", "y")]
        if any(v is not None and float(v.min()) >= SMALLEST_NORMAL for v in added):
            return None
    return op.name


@on_op("softplus")
def softplus(op: Op, graph: Graph) -> str | None:
    """A softplus whose input was bounded before is right."""
    if op.kind not in ("softplus", "softplus_parametric"):
        return None
    given = graph.argument(op, "x")
    before = None if given is None else graph.maker(given)
    return None if before is not None and bounded(before, graph) else op.kind


def bounded(op: Op, graph: Graph) -> bool:
    """Whether an op keeps its results at `RIGHT_SOFTPLUS` or below."""
    names = {"minimum": ("x", "y"), "clip": ("beta",)}.get(op.kind, ())
    values = (graph.value(op, name) for name in names)
    return any(value is not None and bool((value <= RIGHT_SOFTPLUS).all()) for value in values)


@on_op("log-sum-exp")
def log_sum_exp(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind == "reduce_log_sum_exp" else None
