"""Rules about ops that pick: argmax, top-k, gather, and sums that run along an axis."""

from math import prod

from cetane.gates.residency.graph import Graph
from cetane.gates.residency.rule import on_op
from cetane.mil.program import Op

SEEN_TOPK = 128
"""The longest axis over which a top-k was seen on the ANE."""
LARGEST_INDEX = {"int16": 1 << 15, "uint16": 1 << 16}
"""Entries that an index of these types can name."""
GATHERED_WEIGHT = 1 << 18
"""The elements of a result from which a lookup counts as one of weights, not of a table's rows."""
GATHERS = ("gather", "gather_along_axis", "gather_nd")


@on_op("argmax")
def argmax(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind in ("reduce_argmax", "reduce_argmin") else None


def picked_axis(op: Op, graph: Graph) -> int:
    """Entries from which a top-k or a gather picks; 0 for other ops."""
    if op.kind != "topk" and op.kind not in GATHERS:
        return 0
    shape = graph.shape(graph.argument(op, "x"))
    axis = int(graph.number(op, "axis", -1 if op.kind == "topk" else 0))
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


@on_op("wide-topk")
def wide_topk(op: Op, graph: Graph) -> str | None:
    size = picked_axis(op, graph)
    return f"over {size}" if op.kind == "topk" and size > SEEN_TOPK else None


@on_op("narrow-index")
def narrow_index(op: Op, graph: Graph) -> str | None:
    size = picked_axis(op, graph)
    if op.kind == "topk":
        index = op.outputs[1].type if len(op.outputs) > 1 else None
    else:
        index = graph.type(graph.argument(op, "indices"))
    most = LARGEST_INDEX.get(index.dtype) if index is not None else None
    if most is None or size <= most:
        return None
    return f"{op.kind} over {size} entries"


@on_op("gather")
def gather(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind in GATHERS else None


@on_op("weight-gather")
def weight_gather(op: Op, graph: Graph) -> str | None:
    if op.kind not in GATHERS or graph.weight(graph.argument(op, "x")) is None:
        return None
    count = prod(graph.output_shape(op))
    return f"{count} elements a call" if count >= GATHERED_WEIGHT else None


@on_op("dynamic-gather-nd")
def dynamic_gather_nd(op: Op, graph: Graph) -> str | None:
    flexible = any(type_.static_shape is None for type_ in graph.output_types(op))
    return op.kind if op.kind == "gather_nd" and flexible else None


@on_op("cumsum")
def cumsum(op: Op, graph: Graph) -> str | None:
    return op.kind if op.kind in ("cumsum", "cumprod") else None
