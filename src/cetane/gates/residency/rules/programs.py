"""Rules about whole programs: how much is in one, and how many there are."""

from collections.abc import Mapping, Sequence

from cetane.gates.residency.graph import VOCABULARY, Graph
from cetane.gates.residency.rule import Placement, on_bundle, on_function, on_places
from cetane.gates.residency.target import OLDEST

GIB = 1 << 30
MOST_CONSTANTS = 2 * GIB
"""Bytes of constants beyond which a program leaves the ANE."""
SAFE_CONSTANTS = 1_000_000_000
"""Bytes of constants beyond which reports about a program are divided."""
MONOLITH = 1_200_000_000
"""Bytes of constants: between 1059 MB, which ran, and 1.5 GB, which did not."""
TINY = 2_000_000
"""Weights: between a block of 64 channels (CPU) and shards of 4 to 9 million weights (ANE)."""
FEW_LINEARS = 3
LONE_LINEAR, FEW_LINEARS_BYTES = 16_800_000, 40_000_000
"""Bytes of constants from which one linear op, and `FEW_LINEARS` or fewer, were seen on the ANE."""
MOST_OPS = 6000
"""Compute ops: between 20 layers of Gemma, which ran on a phone, and 35 with some 7300 ops."""
LOADED_CONSTANTS = 3_000_000_000
"""Bytes of constants of all packages that a process loads together."""


def megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


@on_function("newer-system")
def newer_system(graph: Graph) -> str | None:
    oldest = OLDEST.get(graph.function.opset, 0)
    return f"from {oldest} on" if graph.target.os < oldest else None


@on_function("program-constants")
def program_constants(graph: Graph) -> str | None:
    size = graph.constant_bytes
    return megabytes(size) if size > MOST_CONSTANTS else None


@on_function("program-constants-risky")
def program_constants_risky(graph: Graph) -> str | None:
    size = graph.constant_bytes
    return megabytes(size) if SAFE_CONSTANTS < size <= MOST_CONSTANTS else None


@on_function("monolith")
def monolith(graph: Graph) -> str | None:
    size = graph.constant_bytes
    matrices = (graph.matrix(op) for op in graph.projections)
    heads = any(max(matrix.shape) >= VOCABULARY for matrix in matrices if matrix is not None)
    layers = any(op.kind in ("softmax", "scaled_dot_product_attention") for op in graph.ops)
    if MONOLITH < size <= MOST_CONSTANTS and heads and layers:
        return megabytes(size)
    return None


@on_function("phone-constants")
def phone_constants(graph: Graph) -> str | None:
    size = graph.constant_bytes
    return megabytes(size) if size > SAFE_CONSTANTS else None


@on_function("tiny-program")
def tiny_program(graph: Graph) -> str | None:
    count = sum(weight.elements for weight in graph.weights.values())
    return f"{count} weights" if graph.ops and count < TINY else None


@on_function("lone-linear")
def lone_linear(graph: Graph) -> str | None:
    kinds = [op.kind for op in graph.projections]
    if not kinds or "conv" in kinds or len(kinds) > FEW_LINEARS:
        return None
    size, limit = graph.constant_bytes, LONE_LINEAR if len(kinds) == 1 else FEW_LINEARS_BYTES
    return f"{len(kinds)} of {megabytes(size)}" if size < limit else None


@on_function("op-count")
def op_count(graph: Graph) -> str | None:
    return f"{len(graph.ops)} ops" if len(graph.ops) > MOST_OPS else None


@on_places("regions")
def regions(graph: Graph, places: Mapping[int, Placement]) -> str | None:
    """Counts the regions on the path with the most, so there are at least as many. Regions are
    numbered along a path. An op off the ANE has the number of the last region before it."""
    number: dict[int, int] = {}
    for op in graph.ops:
        on = places[id(op)] != "CPU"
        least = 1 if on else 0
        for maker in graph.makers(op):
            entered = on and places.get(id(maker)) == "CPU"
            least = max(least, number.get(id(maker), 0) + entered)
        number[id(op)] = least
    count = max(number.values(), default=0)
    return f"at least {count}" if count > 1 else None


@on_bundle("program-count")
def program_count(graphs: Sequence[Graph]) -> str | None:
    count = len({(graph.package, graph.function.name) for graph in graphs})
    most = min(graph.target.limit("programs") for graph in graphs)
    return f"{count} functions" if count > most else None


@on_bundle("loaded-constants")
def loaded_constants(graphs: Sequence[Graph]) -> str | None:
    largest: dict[str, int] = {}
    for graph in graphs:  # functions of a package share their constants
        largest[graph.package] = max(largest.get(graph.package, 0), graph.constant_bytes)
    total = sum(largest.values())
    return f"{megabytes(total)} in {len(largest)} packages" if total > LOADED_CONSTANTS else None
