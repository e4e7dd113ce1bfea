"""Rules about ranks, axes and flexible shapes."""

from math import prod

from cetane.gates.residency.graph import Graph
from cetane.gates.residency.rule import on_function, on_op
from cetane.mil.index import names_of
from cetane.mil.program import Op

LARGE = 1 << 14
"""The elements of a tensor from which its padding gets a finding."""
ROW = 32
"""The fp16 elements of 64 bytes, to which rows are padded."""


def values(op: Op) -> list[str]:
    """The names of the values that an op reads and makes."""
    return [*names_of(op), *(value.name for value in op.outputs)]


@on_op("rank-above-5")
def rank_above_5(op: Op, graph: Graph) -> str | None:
    ranks = [len(graph.shape(name)) for name in values(op)]
    return f"rank {max(ranks)}" if ranks and max(ranks) > 5 else None


@on_function("non-default-shape")
def non_default_shape(graph: Graph) -> str | None:
    ranged = [n for n, t in graph.flexible.items() if not t.enumerated]
    return f"{', '.join(ranged)} {graph.variant}" if graph.variant and ranged else None


@on_op("computed-shape")
def computed_shape(op: Op, graph: Graph) -> str | None:
    if graph.flexible:  # sizes may be its inputs' own, which have rules of their own
        return None
    types = (graph.type(name) for name in values(op))
    return next((f"{t} of {op.kind}" for t in types if t and t.static_shape is None), None)


@on_function("enumerated-layer-norm")
def enumerated_layer_norm(graph: Graph) -> str | None:
    enumerated = any(type_.enumerated for type_ in graph.flexible.values())
    norms = sum(op.kind == "layer_norm" for op in graph.ops)
    return f"{norms} layer_norm" if enumerated and norms else None


@on_op("singleton-last-axis")
def singleton_last_axis(op: Op, graph: Graph) -> str | None:
    shape = graph.output_shape(op)
    if len(shape) == 4 and shape[-1] == 1 and shape[-2] > 1 and prod(shape) >= LARGE:
        return f"{shape} of {op.kind}"
    return None


@on_op("unaligned-last-axis")
def unaligned_last_axis(op: Op, graph: Graph) -> str | None:
    shape = graph.output_shape(op)
    if len(shape) < 2 or shape[-1] == 1 or shape[-1] % ROW == 0 or prod(shape) < LARGE:
        return None
    return f"{shape} of {op.kind}"


@on_op("axis-limit")
def axis_limit(op: Op, graph: Graph) -> str | None:
    longest = max((*graph.output_shape(op), 0))
    return f"an axis of {longest}" if longest > graph.target.limit("axis") else None


@on_op("late-slice")
def late_slice(op: Op, graph: Graph) -> str | None:
    if op.kind != "slice_by_index":
        return None
    begin, mask = graph.number(op, "begin"), graph.number(op, "begin_mask")
    if not begin or begin[-1] == 0 or (mask and mask[-1]):
        return None
    return f"from {begin[-1]} on"
