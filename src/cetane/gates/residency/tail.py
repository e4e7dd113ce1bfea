"""What goes with an op that leaves the ANE: its neighbours up to the edge of the graph.

The audit of CoreML-LLM's last chunk (iPhone 17 Pro, 2026-04-13) found not only argmax and gather on
the CPU but the eight ops from the last convolution to the output: nothing brings a tail back.
"""

from collections.abc import Iterator, Sequence

from cetane.gates.residency.graph import SHAPE_KINDS, UNARY_KINDS, Graph
from cetane.mil.program import Op


def dragged(graph: Graph, leaders: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Ops that go with one of the `leaders`, and which.

    Those in front, of which nothing else reads the results; those behind, whose results reach only
    outputs through ops of their like.
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
    """Whether an op moves values, or works on those of one tensor, element by element."""
    if op.kind in SHAPE_KINDS:
        return True
    computed = [
        a for name in ("x", "y") for a in op.inputs.get(name, ())
        if isinstance(a, str) and graph.weight(a) is None
    ]  # fmt: skip
    return op.kind in UNARY_KINDS and len(computed) == 1


def kept_to(op: Op, graph: Graph, taken: dict[int, Op]) -> bool:
    """Whether only ops that are taken read the results."""
    return not graph.is_output(op) and all(id(user) in taken for user in graph.users(op))


def ends(op: Op, graph: Graph, taken: dict[int, Op]) -> bool:
    """Whether the results reach nothing but outputs, through such ops and those that are taken."""
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
