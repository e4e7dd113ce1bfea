"""cetane plan: what a build would make."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cetane.checkpoint import open_checkpoint
from cetane.cli.output import (
    Json,
    Model,
    RecipeName,
    console,
    errors,
    megabytes,
    print_json,
    progress,
    table,
)
from cetane.errors import CetaneError
from cetane.hardware.chips import DEFAULT_CHIP, Chip, find_chip, load_chips
from cetane.schema.function import ShardPlan
from cetane.schema.interface import Input, Output, State
from cetane.schema.plan import Plan
from cetane.schema.recipe import load_recipe

if TYPE_CHECKING:
    from cetane.perf.combinations import Combination, PlanSweep


def plan(
    model: Model,
    recipe: RecipeName = "default",
    chip: Annotated[
        str | None, typer.Option(help="Predict speed on this chip: m4-max, a19-pro, ...")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Rank all layouts, contracts, formats, T and contexts.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where every predicted number comes from.")
    ] = False,
    json: Json = False,
) -> None:
    """Show shards, functions, bytes and, for a chip, predicted speed, without reading weights."""
    # Imported here: `cetane info` shows a plan too, without torch.
    from cetane.cli.predicted import (
        explain_rates,
        predicted_json,
        show_predicted,
        show_sweep,
        sweep_json,
    )
    from cetane.families import warn_unread
    from cetane.perf.predict import Predictor
    from cetane.planner import Planner

    if chip is None and (sweep or explain):
        raise CetaneError("--sweep and --explain need a chip", f"--chip {', '.join(load_chips())}")
    found = find_chip(chip) if chip else None
    checkpoint, chosen = open_checkpoint(model), load_recipe(recipe)
    predictor = Predictor(found) if found else None
    if sweep and found:
        combinations = swept(PlanSweep(checkpoint, chosen, found))
        if json:
            print_json(sweep_json(combinations, chosen, found))
        else:
            show_sweep(combinations, chosen, found)
    else:
        planner = Planner(checkpoint, chosen)
        resolved = planner.plan()
        if warning := warn_unread(checkpoint.names(), planner.model):
            errors.print(f"warning: {warning}", markup=False, soft_wrap=True)
        if json:
            content = resolved.model_dump(mode="json")
            print_json(content | (predicted_json(planner, predictor) if predictor else {}))
        else:
            show(resolved, found)
            if predictor:
                show_predicted(planner, predictor)
            else:
                console.print("[dim]--chip m4-max predicts its speed there[/]")
    if explain and predictor and not json:
        explain_rates(predictor)


def swept(sweep: "PlanSweep") -> list["Combination"]:
    """All combinations, with a word on how far it is."""
    found = []
    with progress("sweep") as update:
        for index, combination in enumerate(sweep):
            if index % 200 == 0:
                update(combination.layout, index, len(sweep))
            found.append(combination)
    return found


def show(plan: Plan, chip: Chip | None = None) -> None:
    """Print a plan; shards with equal functions share a row of the second table."""
    recipe = plan.recipe
    caches = ", ".join(f"{n} cache ({s.contract}) of {s.count}" for n, s in plan.caches.items())
    console.print(
        f"[bold]{plan.architecture}[/], {plan.layers} layers, recipe {escape(recipe.name)}: "
        f"{caches} slots, "
        f"weights {megabytes(plan.weight_bytes)}, embedding {megabytes(plan.embedding_bytes)}"
    )
    if plan.rows != plan.vocab:
        console.print(f"the head can choose {plan.rows} of {plan.vocab} tokens")
    rows = [
        [s.name, s.kind, len(s.blocks), megabytes(s.weight_bytes), functions(s)]
        for s in plan.shards
    ]
    table("shards", ["name", "kind", "blocks", "weights", "functions:T"], rows)
    programs = len(plan.functions)
    console.print(f"{len(plan.shards)} packages, {programs} programs when every function is loaded")
    most = (chip or find_chip(DEFAULT_CHIP)).figure("programs").value
    if programs > most:
        errors.print(
            f"warning: a process is reported to hold about {most:.0f} loaded programs; "
            "fewer modes, or larger shards, need fewer",
            soft_wrap=True,
        )
    kinds = {shard.kind: shard for shard in reversed(plan.shards)}
    for kind, shard in reversed(kinds.items()):
        function = shard.functions[0]
        ports = [["in", *port(item)] for item in function.inputs]
        ports += [["out", *port(item)] for item in function.outputs]
        ports += [["state", *port(state)] for state in function.states]
        table(f"{shard.name}/{function.name} ({kind})", ["", "name", "shape", "dtype"], ports)
    contexts = [[context, megabytes(size)] for context, size in sorted(plan.kv_bytes.items())]
    table("key/value cache", ["context", "bytes"], contexts)
    if plan.kv_padding:
        context = recipe.cache.context
        console.print(
            f"{megabytes(plan.kv_padding)} of the {megabytes(plan.kv_bytes[context])} at {context} "
            "are padding of states"
        )


def functions(shard: ShardPlan) -> str:
    """Names and widths; those of experts in short."""
    routed = [f for f in shard.functions if f.name.startswith("expert-")]
    named = [f"{f.name}:{f.tokens}" for f in shard.functions if f not in routed]
    return " ".join([*named, *([f"+ {len(routed)} of experts"] if routed else [])])


def port(item: Input | Output | State) -> list[Any]:
    """Name, shape and dtype: a row of the table."""
    return [item.name, "x".join(map(str, item.shape)), item.dtype]
