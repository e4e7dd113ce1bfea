"""Rules about MLState: how many, of which shapes, how they are read and written."""

from collections.abc import Iterator

from cetane.gates.residency.graph import SHAPE_KINDS, Graph
from cetane.gates.residency.rule import on_function, on_op
from cetane.mil.program import Op

ROW = 32
"""The fp16 elements of which a state's last axis must be a multiple."""
MOST_STATES = 2
"""The most states of a function that were seen to run."""
MOST_COLUMNS = 64
"""Columns of one write: between 32, which ran, and 128, which did not."""


def states_behind(
    makers: list[Op], graph: Graph, through: frozenset[str]
) -> Iterator[tuple[Op, list[Op]]]:
    """The reads of states from which the results of some ops come, through ops of the kinds
    `through` alone. Each has the ops on its way, the last one first."""
    todo = [(maker, [maker]) for maker in makers]
    visited: set[int] = set()
    while todo:
        source, path = todo.pop()
        if id(source) in visited:
            continue
        visited.add(id(source))
        if source.kind == "read_state":
            yield source, path[:-1]
        elif source.kind in through:
            todo += [(maker, [*path, maker]) for maker in graph.makers(source)]


def writes(op: Op, graph: Graph) -> bool:
    return op.kind in ("write_state", "coreml_update_state")


def written(op: Op, graph: Graph) -> list[Op]:
    """The ops that make what an op writes into a state. Of a part of the state, what it becomes."""
    made: list[Op | None] = []
    for maker in graph.makers(op) if writes(op, graph) else ():
        update = graph.argument(maker, "update") if maker.kind == "slice_update" else None
        made.append(maker if update is None else graph.maker(update))
    return [maker for maker in made if maker is not None]


@on_function("three-states")
def three_states(graph: Graph) -> str | None:
    count = len(graph.function.states)
    return f"{count} states" if count > MOST_STATES else None


@on_op("convolution-state")
def convolution_state(op: Op, graph: Graph) -> str | None:
    if op.kind != "conv":
        return None
    source = next(states_behind(graph.makers(op), graph, SHAPE_KINDS), None)
    return f"{op.name}" if source else None


@on_function("state-last-axis")
def state_last_axis(graph: Graph) -> str | None:
    odd = [f"{n} {t}" for n, t in graph.function.states.items() if graph.shape(n)[-1:] != ()
           and graph.shape(n)[-1] % ROW]  # fmt: skip
    return ", ".join(odd) or None


@on_op("state-shift")
def state_shift(op: Op, graph: Graph) -> str | None:
    for _, path in states_behind(written(op, graph), graph, SHAPE_KINDS):
        kinds = [step.kind for step in path]
        if "concat" in kinds and any(kind.startswith("slice_by") for kind in kinds):
            return op.name
    return None


@on_op("state-blend")
def state_blend(op: Op, graph: Graph) -> str | None:
    """The written value comes from the state through a product or a select."""
    through = SHAPE_KINDS | {"add", "mul", "select", "sub"}
    for _, path in states_behind(written(op, graph), graph, through):
        kinds = {step.kind for step in path}
        if kinds & {"mul", "select"}:
            return op.name
    return None


@on_op("state-view")
def state_view(op: Op, graph: Graph) -> str | None:
    if not writes(op, graph):
        return None
    through = SHAPE_KINDS | {"slice_update", "add", "mul"}
    for _, path in states_behind(graph.makers(op), graph, through):
        kinds = {step.kind for step in path}
        if {"reshape", "transpose"} <= kinds:
            return op.name
    return None


@on_op("state-output")
def state_output(op: Op, graph: Graph) -> str | None:
    sliced = op.kind.startswith("slice_by") and graph.is_output(op)
    if not sliced or graph.tokens == 1:
        return None
    source = next(states_behind(graph.makers(op), graph, SHAPE_KINDS | {"slice_update"}), None)
    return f"{op.name}, T = {graph.tokens}" if source else None


@on_function("two-states-verify")
def two_states_verify(graph: Graph) -> str | None:
    if graph.functions > 1 and len(graph.function.states) == 2 and graph.tokens > 1:
        return f"{graph.function.name}, T = {graph.tokens}"
    return None


@on_op("wide-state-update")
def wide_state_update(op: Op, graph: Graph) -> str | None:
    source = next(states_behind(graph.makers(op), graph, SHAPE_KINDS), None)
    if op.kind != "slice_update" or source is None:
        return None
    kept, update = graph.output_shape(op), graph.shape(graph.argument(op, "update"))
    written = [new for new, all_ in zip(update, kept, strict=False) if new != all_]
    return f"{max(written)} columns" if written and max(written) > MOST_COLUMNS else None


@on_function("state-flexible")
def state_flexible(graph: Graph) -> str | None:
    enumerated = [name for name, type_ in graph.flexible.items() if type_.enumerated]
    return ", ".join(enumerated) if graph.function.states and enumerated else None


@on_function("state-range")
def state_range(graph: Graph) -> str | None:
    ranged = [name for name, type_ in graph.flexible.items() if not type_.enumerated]
    return ", ".join(ranged) if graph.function.states and ranged else None


@on_function("states")
def states(graph: Graph) -> str | None:
    return ", ".join(graph.function.states) or None
