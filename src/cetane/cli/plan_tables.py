"""Lines and tables of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cetane.cli.output import megabytes, say, say_wrapped, several, table, warn
from cetane.compress import AUTO
from cetane.hardware.chips import DEFAULT_CHIP, find_chip

if TYPE_CHECKING:
    from cetane.schema.function import ShardPlan
    from cetane.schema.interface import Input, Output, State
    from cetane.schema.plan import Plan


def show(plan: Plan, chip: str | None = None, tables: bool = True) -> None:
    """Print a plan. Shards with equal functions share a table of inputs and outputs."""
    show_summary(plan)
    most = find_chip(chip or DEFAULT_CHIP).figure("programs").value
    if len(plan.functions) > most:
        others = ", or fewer adapters" if plan.adapters else ""
        warn(
            f"warning: reports say that a process holds about {most:.0f} loaded programs; "
            f"use fewer modes or larger shards{others}"
        )
    if tables:
        show_tables(plan)


def show_summary(plan: Plan) -> None:
    """Print the model and its context, packages and calls, bytes, and what only some plans have."""
    recipe = plan.recipe
    form = "" if recipe.cache.format == "fp16" else f" {recipe.cache.format}"
    cache = f"{megabytes(plan.kv_bytes[recipe.cache.context])}{form}"
    weights = stored(plan.weight_bytes, recipe.compression.default)
    embedding = stored(plan.embedding_bytes, recipe.embedding.format)
    first = (
        f"{plan.architecture}, {plan.layers} layers; recipe {recipe.name}: context "
        f"{recipe.cache.context}, {caches(plan)}"
    )
    say_wrapped(first)
    say_wrapped(
        f"  {several(len(plan.shards), 'package')}, {several(len(plan.functions), 'function')}; "
        f"calls of {widths(plan)} tokens"
    )
    say_wrapped(f"  weights {weights}, embedding {embedding}, cache {cache}")
    streaming = recipe.cache.streaming
    if streaming is not None:
        kept = streaming.kept()
        heads = sum(len(streaming.scores.layers[layer]) for layer in kept)
        say_wrapped(
            f"  {sum(map(len, kept.values()))} of {heads} key/value heads keep all tokens, the "
            f"others {streaming.sinks} sinks and a window of {streaming.window}"
        )
    if plan.smaller:
        sizes = [str(one.tokens) for one in plan.capacities]
        own = sum(function.capacity is not None for function in plan.functions.values())
        say_wrapped(
            f"  capacities of {', '.join(sizes)} tokens; {own} functions for the smaller ones"
        )
    for name, adapter in plan.adapters.items():
        own = sum(function.adapter == name for function in plan.functions.values())
        kind = f"rank {adapter.rank}{', DoRA' if adapter.dora else ''}"
        say(f"  adapter {name}: {kind}, {megabytes(adapter.weight_bytes)} more, {own} functions")
    if plan.adapters:
        say("  adapters share the weights, which each package stores once")
    if plan.rows != plan.vocab:
        say(f"  the head can choose {plan.rows} of {plan.vocab} tokens")


def caches(plan: Plan) -> str:
    """The cache groups, those of the same slots together."""
    alike: dict[str, list[str]] = {}
    for name, slots in plan.caches.items():
        alike.setdefault(f"{slots.contract} {slots.count}", []).append(name)
    return ", ".join(f"{' '.join(names)} {slots}" for slots, names in alike.items())


def stored(nbytes: int, form: str) -> str:
    """Bytes and their format. What `port` is still to choose has at least these bytes."""
    return f"from {megabytes(nbytes)}" if form == AUTO else f"{megabytes(nbytes)} {form}"


def widths(plan: Plan) -> str:
    """The tokens of every mode's call, in words, by their number: a manifest has them by name."""
    modes = sorted(plan.modes.items(), key=lambda item: item[1].tokens)
    return ", ".join(f"{mode.tokens} ({name})" for name, mode in modes)


def show_tables(plan: Plan) -> None:
    """Print shards, the interface of the first shard of every kind, and the cache by context."""
    rows = [
        [s.name, s.kind, len(s.blocks), megabytes(s.weight_bytes), functions(s)]
        for s in plan.shards
    ]
    table("shards", ["name", "kind", "blocks", "weights", "functions:T"], rows)
    kinds = {shard.kind: shard for shard in reversed(plan.shards)}
    for kind, shard in reversed(kinds.items()):
        function = shard.functions[0]
        slots = [["in", *interface(item)] for item in function.inputs]
        slots += [["out", *interface(item)] for item in function.outputs]
        slots += [["state", *interface(state)] for state in function.states]
        table(f"{shard.name}/{function.name} ({kind})", ["", "name", "shape", "dtype"], slots)
    contexts = [[context, megabytes(size)] for context, size in sorted(plan.kv_bytes.items())]
    table("key/value cache", ["context", "bytes"], contexts)
    if plan.kv_padding:
        context = plan.recipe.cache.context
        say_wrapped(
            f"{megabytes(plan.kv_padding)} of the {megabytes(plan.kv_bytes[context])} at {context} "
            "are padding of states"
        )


def functions(shard: ShardPlan) -> str:
    """The names and widths of functions; those of experts and adapters only as numbers."""
    adapted = [f for f in shard.functions if f.adapter is not None]
    routed = [f for f in shard.functions if f.name.startswith("expert-") and f not in adapted]
    named = [f"{f.name}:{f.tokens}" for f in shard.functions if f not in (*routed, *adapted)]
    more = {"experts": len(routed), "adapters": len(adapted)}
    return " ".join([*named, *(f"+ {n} of {kind}" for kind, n in more.items() if n)])


def interface(item: Input | Output | State) -> list[Any]:
    """Name, shape and dtype: a row of the table."""
    return [item.name, "x".join(map(str, item.shape)), item.dtype]
