"""cetane plan: the shards, functions and bytes of a future build."""

from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import (
    ALLOW_OFF_ANE,
    Adapters,
    Bits,
    Context,
    ForChip,
    Json,
    Lora,
    Model,
    RecipeName,
    Settings,
    Verbose,
    os_option,
    parse_adapters,
    parse_changes,
)
from cetane.cli.output import print_json, progress, say, say_next, show_warnings
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.gates.residency.target import Target
    from cetane.pipeline.request import Request


OsOption = Annotated[float | None, os_option("With --chip: ")]
SweepOption = Annotated[
    bool,
    typer.Option(
        "--sweep", help="With --chip: rank all layouts, contracts, formats, T and contexts."
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="With --chip: show the source of every predicted number."),
]


def plan(
    model: Model,
    recipe: RecipeName = "default",
    context: Context = None,
    bits: Bits = None,
    settings: Settings = None,
    lora: Lora = None,
    adapter: Adapters = None,
    chip: ForChip = None,
    os: OsOption = None,
    sweep: SweepOption = False,
    explain: ExplainOption = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show the shards, functions and bytes of a port.

    It reads no weights, and builds nothing. It refuses whatever input port would refuse. With
    --chip, it shows the layout that port would choose for that chip. It then predicts the speed
    there, and warns where rules put the model off the ANE.
    """
    from cetane.cli import forecast as shown
    from cetane.cli import plan_tables

    if sweep and explain:
        raise CetaneError("--sweep and --explain exclude each other")
    if chip is None and (sweep or explain or os):
        raise CetaneError("--sweep, --explain and --os need a chip", shown.known_chips())
    with progress("plan"):  # which imports for seconds
        from cetane.gates.residency.target import DEFAULT_OS, Target
        from cetane.pipeline.request import make_request

        target = Target(chip, os or DEFAULT_OS) if chip is not None else None
        request = make_request(
            model, recipe, context, bits, parse_changes(settings), lora=lora,
            adapters=parse_adapters(adapter),
        )  # fmt: skip
        from cetane.pipeline.plan import PlannedResidency, forecast, planner_for
    if target and sweep:
        rank_all(request, target, json)
        return
    with progress("plan"):
        planner = planner_for(request, target)
        resolved = planner.plan()
        predicted = forecast(planner, target.chip) if target else None
        residency = PlannedResidency(planner, target) if target else None
    warnings = [request.warning] if request.warning else []
    if json:
        content = resolved.model_dump(mode="json") | {"warnings": warnings}
        for name, told in (("predicted", predicted), ("residency", residency)):
            content |= {} if told is None else {name: told.as_json()}
        print_json(content)
    else:
        plan_tables.show(resolved, chip, verbose or predicted is None)
        show_warnings(warnings)
        if predicted and residency:
            shown.show(predicted, explain)
            shown.show_residency(residency, speeds=predicted.predictor is not None)
        else:
            say("to predict the speed on a chip, add --chip m4-max")
        options = {
            "-r": None if recipe == "default" else recipe, "--context": context, "--bits": bits,
            "--set": settings, "--lora": lora, "--adapter": adapter, "--chip": chip, "--os": os,
        }  # fmt: skip
        newer = residency.newer_system if residency else None
        if newer is not None:
            say_next("plan", model, options=options | {"--os": newer})
        else:
            refused = residency is not None and not residency.audit.passed
            say_next("port", model, options=options | {ALLOW_OFF_ANE: refused})


def rank_all(request: "Request", target: "Target", json: bool) -> None:
    """Print all combinations by predicted speed."""
    from cetane.cli.forecast import show_ranking
    from cetane.pipeline.plan import rank

    with progress("combinations") as update:
        ranking = rank(request, target, update)
    if json:
        print_json({"predicted": ranking.as_json()})
    else:
        show_ranking(ranking)
