"""Rules about how weights are stored."""

from collections.abc import Callable, Iterator

from cetane.gates.residency.graph import Graph, ReadWeight
from cetane.gates.residency.rule import on_function, on_op
from cetane.mil.program import Op

LARGE_GRAPH = 97
"""The number of projections of the only graph with int4 per block that was seen on the ANE."""


def read_by(op: Op, graph: Graph) -> Iterator[ReadWeight]:
    """The constants that an op reads."""
    for arguments in op.inputs.values():
        for argument in arguments:
            weight = graph.weight(argument) if isinstance(argument, str) else None
            if weight is not None:
                yield weight


def first(op: Op, graph: Graph, wanted: Callable[[ReadWeight], bool]) -> ReadWeight | None:
    return next((weight for weight in read_by(op, graph) if wanted(weight)), None)


def per_block(weight: ReadWeight, bits: int) -> bool:
    affine = weight.encoding == "affine" and weight.inner is None
    return affine and weight.bits == bits and weight.granularity == "block"


def is_large(graph: Graph) -> bool:
    return bool(graph.function.states) and len(graph.projections) >= LARGE_GRAPH


def int4_blocks(graph: Graph) -> int:
    return sum(per_block(weight, 4) for weight in graph.weights.values())


@on_function("int4-per-block")
def int4_per_block(graph: Graph) -> str | None:
    count = int4_blocks(graph)
    return f"{count} weights" if count and not is_large(graph) else None


@on_function("int4-per-block-large")
def int4_per_block_large(graph: Graph) -> str | None:
    count = int4_blocks(graph)
    return f"{count} weights" if count and is_large(graph) else None


@on_op("int4-per-channel")
def int4_per_channel(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: w.encoding == "affine" and w.bits == 4)
    return weight.granularity if weight and weight.granularity != "block" else None


@on_op("int8-per-block")
def int8_per_block(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: per_block(w, 8))
    return f"{weight.shape}" if weight else None


@on_op("int8-linear")
def int8_linear(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: w.encoding == "affine" and w.bits == 8)
    return weight.granularity if weight and weight.granularity != "block" else None


@on_op("palette-per-block")
def palette_per_block(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: w.encoding == "lut" and w.granularity == "block")
    return f"{weight.shape}" if weight else None


@on_op("palette-per-channel")
def palette_per_channel(op: Op, graph: Graph) -> str | None:
    found = first(op, graph, lambda w: w.encoding == "lut" and w.granularity == "channel")
    return f"{found.shape}" if found else None


@on_op("scaled-palette")
def scaled_palette(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: w.inner is not None and w.inner.encoding == "lut")
    return f"{weight.shape}" if weight else None


@on_op("int8-palette")
def int8_palette(op: Op, graph: Graph) -> str | None:
    def wanted(weight: ReadWeight) -> bool:
        stored = weight.inner or weight
        return stored.encoding == "lut" and stored.palette in ("int8", "uint8")

    weight = first(op, graph, wanted)
    return f"{weight.shape}" if weight else None


@on_op("vector-palette")
def vector_palette(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: (w.inner or w).vector > 1)
    return f"{(weight.inner or weight).vector} weights an entry" if weight else None


@on_op("sparse-weights")
def sparse_weights(op: Op, graph: Graph) -> str | None:
    weight = first(op, graph, lambda w: w.encoding == "sparse")
    return f"{weight.shape}" if weight else None


@on_function("stateful-palette4")
def stateful_palette4(graph: Graph) -> str | None:
    count = sum(w.encoding == "lut" and w.bits == 4 for w in graph.weights.values())
    return f"{count} palettes" if count and graph.function.states else None


@on_function("int8-folded")
def int8_folded(graph: Graph) -> str | None:
    count = sum(w.encoding == "affine" and w.bits == 8 for w in graph.weights.values())
    return f"{count} weights" if count else None
