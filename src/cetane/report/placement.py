"""The placement map: the kinds of op in each block, and the places that the audit gives them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cetane.gates.residency.audit import UNSEEN, Audit, Placed, weights_off_ane
from cetane.gates.residency.graph import Graph
from cetane.gates.residency.rule import GOOD_TO_BAD, Evidence, Placement, find
from cetane.mil.program import Op, Program
from cetane.report.content.placement import Cell, Column, KindRow, PlacementMap, Reason, Residency
from cetane.schema.function import Route
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

BLOCK = re.compile(r"blocks_(\d+)_")
"""The names of a shard's weights in its programs: `lower/` numbers the blocks of a function."""


@dataclass(frozen=True)
class Ops:
    """The ops of one column of the map."""

    column: Column
    ops: tuple[Placed, ...]


def residency(plan: Plan, programs: Mapping[str, Program], audit: Audit) -> Residency:
    """An audit as a picture: a map for every mode, and the reasons for the places."""
    graphs = {
        (name, function.name): Graph(function, audit.target, name)
        for name, program in programs.items()
        for function in program.functions.values()
    }
    placed = {(f.package, f.function): f.ops for f in audit.functions if not f.variant}
    maps = [
        placement_map(mode, steps.tokens, list(columns(plan, mode, graphs, placed)))
        for mode, steps in plan.modes.items()
    ]
    return Residency(
        target=str(audit.target),
        basis=audit.basis,
        weights_off_ane=weights_off_ane(audit.functions),
        maps=tuple(maps),
        reasons=tuple(reasons([op for ops in placed.values() for op in ops])),
    )


def columns(
    plan: Plan,
    mode: Mode,
    graphs: Mapping[tuple[str, str], Graph],
    placed: Mapping[tuple[str, str], tuple[Placed, ...]],
) -> Iterator[Ops]:
    """The blocks of a mode, in the order of its calls. A shard's calls take its blocks in turn."""
    left = {shard.name: list(shard.blocks) for shard in plan.shards}
    last = dict.fromkeys(left, "")
    for step in plan.modes[mode].steps:
        if isinstance(step, Route):
            names = [functions[-1] for functions in step.experts]
            block = f"{last[step.shard]} experts ×{len(names)}"
            ops = [op for name in names for op in placed[step.shard, name]]
            yield Ops(Column(shard=step.shard, block=block), tuple(ops))
            continue
        owners = blocks_of(graphs[step.shard, step.function])
        count = max(owners, default=0) + 1
        blocks = left[step.shard][:count]
        left[step.shard] = left[step.shard][count:]
        for index in range(count):
            block = blocks[index] if index < len(blocks) else step.function
            last[step.shard] = block
            mine = zip(placed[step.shard, step.function], owners, strict=True)
            yield Ops(
                Column(shard=step.shard, block=block),
                tuple(op for op, owner in mine if owner == index),
            )


def blocks_of(graph: Graph) -> list[int]:
    """The block of every compute op of a function, counted within the function.

    An op belongs to the block whose weights it reads, or whose weighted op's result it reads. Any
    other op belongs to the next op with weights, as the first ops of a norm do.
    """
    own = [block_read(op) for op in graph.ops]
    weighted = {id(op): block for op, block in zip(graph.ops, own, strict=True)}
    for index, op in enumerate(graph.ops):
        if own[index] is None:
            before = [weighted[id(maker)] for maker in graph.makers(op)]
            own[index] = max((block for block in before if block is not None), default=None)
    following = max((block for block in own if block is not None), default=0)
    for index in range(len(own) - 1, -1, -1):
        following = own[index] = following if (block := own[index]) is None else block
    return [block or 0 for block in own]


def block_read(op: Op) -> int | None:
    """The block whose weights an op reads."""
    for arguments in op.inputs.values():
        for name in arguments:
            if isinstance(name, str) and (block := BLOCK.match(name)):
                return int(block[1])
    return None


def placement_map(mode: Mode, tokens: int, mapped: Sequence[Ops]) -> PlacementMap:
    """The map of a mode: kinds of op, the commonest first, by blocks."""
    kinds = Counter(op.kind for column in mapped for op in column.ops)
    placed = Counter(op.final for column in mapped for op in column.ops)
    return PlacementMap(
        mode=mode,
        tokens=tokens,
        ops=kinds.total(),
        placed=worst_last(placed),
        columns=tuple(column.column for column in mapped),
        rows=tuple(
            KindRow(
                kind=kind,
                ops=count,
                cells=tuple(cell([o for o in c.ops if o.kind == kind]) for c in mapped),
            )
            for kind, count in kinds.most_common()
        ),
    )


def cell(ops: Sequence[Placed]) -> Cell | None:
    if not ops:
        return None
    rules = dict.fromkeys("measured" if op.measured else op.rule for op in ops)
    return Cell(placed=worst_last(Counter(op.final for op in ops)), rules=tuple(rules))


def worst_last(placed: Counter[Placement]) -> dict[Placement, int]:
    return {place: placed[place] for place in GOOD_TO_BAD if placed[place]}


def reasons(ops: Sequence[Placed]) -> Iterator[Reason]:
    """The reasons for the places of all functions' ops, the worst first."""
    by_rule: dict[str, list[Placed]] = {}
    for op in ops:
        by_rule.setdefault("measured" if op.measured else op.rule, []).append(op)
    order = sorted(
        by_rule.items(), key=lambda item: (-GOOD_TO_BAD.index(item[1][0].final), -len(item[1]))
    )
    for rule, mine in order:
        message, fix, source = explain(rule)
        kinds = Counter(op.kind for op in mine)
        yield Reason(
            rule=rule,
            placement=max((op.final for op in mine), key=GOOD_TO_BAD.index),
            confidence="high" if rule == "measured" else mine[0].confidence,
            ops=len(mine),
            kinds=tuple(kind for kind, _ in kinds.most_common()),
            message=message,
            fix=fix,
            source=source,
        )


def explain(rule: str) -> tuple[str, str, str]:
    """A rule's message, its fix and its source."""
    if rule == UNSEEN:
        return "nobody has reported where this kind of op runs", "cetane audit --measure", ""
    if rule == "measured":
        return "a Mac's own compute plan", "", "MLComputePlan"
    known = find(rule)
    source = f"{known.sources[0].where}, {known.sources[0].date}"
    if isinstance(known, Evidence):
        return known.sources[0].claim, "", source
    return known.message, known.fix, source
