"""The contract of a bundle as data: what a host gives to every function, and takes from it."""

from typing import Any

from cetane.bundle.rows import ROW_FORMATS
from cetane.engine.schedule import skips
from cetane.schema.function import CapacityPlan, Function, ShardPlan
from cetane.schema.interface import (
    MASKED,
    Embedding,
    FromCache,
    FromHistory,
    FromMatrix,
    FromTensor,
    Input,
    Mask,
    Output,
    Position,
    PositionRows,
    Rotary,
    ToCache,
    ToChoice,
    TokenIds,
    ToLogits,
    ToMatrix,
    ToTensor,
)
from cetane.schema.manifest import rotary_path, shard_path, table_path
from cetane.schema.plan import Plan
from cetane.schema.slots import Slots

SCHEMA = 1


def describe(plan: Plan) -> dict[str, Any]:
    """What follows from a bundle's plan. Paths are relative to the folder."""
    subset = plan.recipe.head.subset
    return {
        "schema": SCHEMA,
        "architecture": plan.architecture,
        "order": plan.recipe.tensor_layout,
        "context": plan.recipe.cache.context,
        "vocabulary": plan.vocab,
        "rows": None if subset is None else [int(token) for token in subset.ids],
        "softcap": plan.softcap,
        "masked": MASKED,
        "tables": tables(plan),
        "row_format": plan.recipe.embedding.rows,
        "groups": {name: group(plan, slots) for name, slots in plan.caches.items()},
        "buffers": buffers(plan),
        "int8": whole_numbers(plan),
        "modes": modes(plan),
        "capacities": [capacity(plan, one) for one in plan.capacities] if plan.smaller else [],
        "adapters": {name: modes(plan.on(name)) for name in plan.adapters},
        "shards": [shard(plan, one) for one in plan.shards],
    }


def tables(plan: Plan) -> dict[str, list[str]]:
    """The files of every table."""
    row_format = ROW_FORMATS[plan.recipe.embedding.rows]
    rows = {
        name: [table_path(name, part) for part in row_format.stored(table)]
        for name, table in plan.tables.items()
    }
    return rows | {f"rotary-{name}": [rotary_path(name)] for name in plan.rotary}


def group(plan: Plan, slots: Slots) -> dict[str, Any]:
    """A cache group. `forms` has the contract of its calls by mode; `ends` is true if a call must
    not pass its last slot."""
    forms = {mode: slots.contract_for(chosen.tokens) for mode, chosen in plan.modes.items()}
    ends = slots.contract == "stateful" and slots.limited
    return slots.model_dump() | {"forms": forms, "ends": ends}


def buffers(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers that the host keeps, by name: caches, histories and matrices.

    Caches have their length at the whole context.
    """
    return {
        item.source.name: item.shape
        for function in plan.functions.values()
        if function.capacity is None
        for item in function.inputs
        if isinstance(item.source, FromCache | FromHistory | FromMatrix)
    }


def whole_numbers(plan: Plan) -> list[str]:
    """The buffers that are int8."""
    return sorted(
        {
            item.source.name
            for function in plan.functions.values()
            for item in function.inputs
            if isinstance(item.source, FromCache) and item.dtype == "int8"
        }
    )


def capacity(plan: Plan, one: CapacityPlan) -> dict[str, Any]:
    """A capacity: its groups and modes, and the slots of each cache that it keeps.

    `shifts` is true of a cache whose new slots are on the left.
    """
    only = plan.at(one.tokens)
    caches = {
        item.source.name: item.source.group
        for function in plan.functions.values()
        for item in function.inputs
        if isinstance(item.source, FromCache)
    }
    return {
        "tokens": one.tokens,
        "groups": {name: group(only, slots) for name, slots in one.caches.items()},
        "modes": modes(only),
        "adapters": {name: modes(only.on(name)) for name in plan.adapters},
        "caches": {
            name: {"slots": one.caches[g].count, "shifts": one.caches[g].contract == "shift"}
            for name, g in caches.items()
        },
    }


def modes(plan: Plan) -> list[dict[str, Any]]:
    """The modes in ascending width, without a second one of the same width.

    `pads` is true if a call may hold fewer tokens; `skips` if its silent calls leave out layers.
    """
    described: dict[int, dict[str, Any]] = {}
    for tokens, name in sorted((mode.tokens, name) for name, mode in plan.modes.items()):
        mode = plan.modes[name]
        described.setdefault(tokens, {"name": name} | mode.model_dump() | {
            "pads": all(slots.pads(tokens) for slots in plan.caches.values()),
            "skips": skips(plan, mode),
        })  # fmt: skip
    return list(described.values())


def shard(plan: Plan, described: ShardPlan) -> dict[str, Any]:
    """A package and its functions."""
    return {
        "name": described.name,
        "package": shard_path(described.name),
        "blocks": described.blocks,
        "functions": [function(plan, one) for one in described.functions],
    }


def function(plan: Plan, described: Function) -> dict[str, Any]:
    """A function. `means` says in words who fills an input, and what becomes of an output."""
    content = described.model_dump()
    for side, ports in (("inputs", described.inputs), ("outputs", described.outputs)):
        content[side] = [port.model_dump() | {"means": means(plan, port)} for port in ports]
    return content


def means(plan: Plan, port: Input | Output) -> str:
    """Who fills an input, and when; or what becomes of an output."""
    return given(port) if isinstance(port, Input) else taken(plan, port)


def given(item: Input) -> str:
    """Who fills an input, and when."""
    match item.source:
        case Embedding(table=table):
            return f"the rows of the call's tokens in {table_path(table)}, as columns"
        case PositionRows(table=table):
            return f"the rows of the call's positions in {table_path(table)}, as columns"
        case TokenIds():
            return "the token ids of the call"
        case Rotary(table=table, part=part):
            return f"the {part} rows of the call's positions in {rotary_path(table)}, as columns"
        case Mask(group=name, window=window, sinks=sinks, distances=distances):
            seen = "all tokens up to its own" if window is None else f"the last {window} tokens"
            first = f" and the first {sinks} of the sequence" if sinks else ""
            shown = f"{'minus their distance' if distances else 0} where a token sees a key"
            return f"{shown} of {name}, else {MASKED:g}; it sees {seen}{first}"
        case Position(group=name):
            return f"the slot of {name} into which the call's first token is written"
        case FromTensor(name=name):
            return f"the tensor {name}, which an earlier function of the call gave"
        case FromCache(name=name):
            return f"the buffer {name}, zeros before the first call"
        case FromMatrix(name=name):
            return f"the matrices {name}, zeros before the first call"
        case FromHistory(name=name):
            return f"the buffer {name}: the last columns before this call, zeros at the start"
    return f"1 in each token's row at the slot of {item.source.group} that it is written into"


def taken(plan: Plan, item: Output) -> str:
    """What becomes of an output."""
    match item.sink:
        case ToTensor(name=name):
            return f"the tensor {name}, for a later function of the call"
        case ToCache(name=name, write="replace"):
            return f"replaces the buffer {name}"
        case ToCache(name=name, group=cache):
            if plan.caches[cache].contract == "shift":
                return f"new columns: append them to the buffer {name}, drop as many oldest ones"
            held = ", as int8: they are whole numbers" if name in whole_numbers(plan) else ""
            return f"new columns: write each into the buffer {name}, at its token's slot{held}"
        case ToLogits(start=start, stop=stop):
            return f"logits of the head's rows {start} to {stop - 1}"
        case ToChoice(part="row", start=start, block=1):
            return f"each token's largest logit of the slice: its row less {start}"
        case ToChoice(part="row", start=start, block=block):
            return (
                f"each token's largest logit of the slice: its row less {start}, as a number of "
                f"blocks of {block} rows, and the rows after them"
            )
        case ToChoice():
            return "each token's largest logit of the slice"
        case ToMatrix(name=name, groups=groups):
            return f"keys, values and {groups} decays of each head: fold them into {name}"
    return f"new columns: append them to the buffer {item.sink.name}, drop as many oldest ones"
