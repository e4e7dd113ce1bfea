"""The tail of an op that leaves the ANE: the neighbours that leave with it, up to the graph's edge.

CoreML-LLM audited its last chunk (iPhone 17 Pro, 2026-04-13): argmax and gather were on the CPU.
So were the eight ops from the last convolution to the output: a tail does not return to the ANE.
"""

from collections.abc import Iterator, Sequence

from cetane.gates.residency.graph import SHAPE_KINDS, UNARY_KINDS, Graph
from cetane.mil.program import Op


def dragged(graph: Graph, leaders: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Pairs of an op that leaves the ANE, and the op of `leaders` that takes it along.

    All such ops follow (`follows`). Those before a leader have results that only leaving ops read.
    Those behind it have results that reach only outputs, through similar ops.
    """
    taken = {id(op): op for op in leaders}
    todo = list(leaders)
    while todo:
        op = todo.pop()
        leader = taken[id(op)]
        near = [m for m in graph.makers(op) if follows(m, graph) and kept_to(m, graph, taken)]
        near += [u for u in graph.users(op) if follows(u, graph) and ends(u, graph, taken)]
        for neighbour in near:
            if id(neighbour) not in taken:
                taken[id(neighbour)] = leader
                todo.append(neighbour)
                yield neighbour, leader


def follows(op: Op, graph: Graph) -> bool:
    """Whether an op only moves values, or computes on one tensor, element by element."""
    if op.kind in SHAPE_KINDS:
        return True
    computed = [
        a for name in ("x", "y") for a in op.inputs.get(name, ())
        if isinstance(a, str) and graph.weight(a) is None
    ]  # fmt: skip
    return op.kind in UNARY_KINDS and len(computed) == 1


def kept_to(op: Op, graph: Graph, taken: dict[int, Op]) -> bool:
    """Whether only ops in `taken` read the op's results."""
    return not graph.is_output(op) and all(id(user) in taken for user in graph.users(op))


def ends(op: Op, graph: Graph, taken: dict[int, Op]) -> bool:
    """Whether the op's results reach only outputs, through ops that follow or are in `taken`."""
    todo, visited = [op], {id(op)}
    while todo:
        for user in graph.users(todo.pop()):
            if id(user) in taken or id(user) in visited:
                continue
            if not follows(user, graph):
                return False
            visited.add(id(user))
            todo.append(user)
    return True
