"""cetane sweep: judges many compressions of a model, by size and quality."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.crew import crew
from cetane.cli.options import (
    ALLOW_OFF_ANE,
    ChipName,
    Json,
    Lora,
    Model,
    OsNumber,
    RecipeName,
    Scheduler,
    StoreUrl,
    Verbose,
    Workers,
)
from cetane.cli.output import (
    conclude,
    megabytes,
    progress,
    say,
    say_next,
    say_wrapped,
    several,
    table,
    warn,
)

if TYPE_CHECKING:
    from cetane.sweeps.points import Point
    from cetane.sweeps.run import SweepResult


TextOption = Annotated[
    Path | None,
    typer.Option(help="The text to measure and judge on.", show_default="a text of cetane"),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="The size of the chosen point: 4.25 bits a weight, or 60MB of weights and tables.",
        show_default="that of palette4-kmeans-group32",
    ),
]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only formats of this name or pattern; '*' for all formats. May be repeated.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="The folder.", show_default="NAME-sweep")
]


def sweep(
    model: Model,
    text: TextOption = None,
    budget: BudgetOption = None,
    formats: FormatsOption = None,
    chip: ChipName = None,
    os: OsNumber = None,
    recipe: RecipeName = "default",
    lora: Lora = None,
    output: OutputOption = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: StoreUrl = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Judge many compressions of a model, and choose one.

    It judges them on a text, and builds none. It writes the points, a plot, and the chosen point as
    a recipe. After an interruption, run it again: it keeps its results. Exit code 1 where every
    point is larger than --budget.
    """
    from cetane.gates.residency.target import DEFAULT_OS
    from cetane.hardware.chips import DEFAULT_CHIP

    with crew(workers, scheduler, store) as opened, progress("sweep") as update:
        from cetane.sweeps.run import sweep as run_sweep  # which imports for seconds

        result = run_sweep(
            model, text=text, budget=budget, formats=formats or [],
            chip=DEFAULT_CHIP if chip is None else chip, os=os or DEFAULT_OS, recipe=recipe,
            lora=lora, output=output, workers=opened, progress=update,
        )  # fmt: skip
    asked = {"--lora": lora, "--chip": chip, "--os": os}
    conclude(result, json, lambda made: show(made, verbose, model, asked))


def show(result: SweepResult, verbose: bool, model: str, asked: Mapping[str, object]) -> None:
    """Print the points of the front, or all, the chosen point, the files, and what follows: a port
    with the options that were asked for here. Off a named chip's ANE, it needs one more."""
    front = {point.key for point in result.front}
    chosen = None if result.chosen is None else result.chosen.key
    known = sorted(result.points, key=lambda p: (-p.weight_bytes, p.kl))
    shown = known if verbose else [p for p in known if p.key in front or p.key == chosen]
    first = known[0]
    table(
        f"{first.text.tokens} tokens of {first.text.name}, largest first",
        ["point", "MB", "bits", "ppl", "KL", "top-1", "smoke", "tok/s"],
        [row(point, chosen, result.table_bytes) for point in shown],
    )
    say_wrapped(f"MB of weights and tables; tok/s predicted for {first.predicted.target}")
    if len(shown) < len(known):
        left = several(len(known) - len(shown), "point")
        say(f"not shown: {left}, larger and worse than these; -v lists all")
    for name, reason in result.refused.items():
        warn(f"left out: {name}: {reason}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in shown:
        if share := point.predicted.weights_off_ane:
            why = f"{share:.0%} of the weights", ", ".join(sorted(point.predicted.rules))
            reasons.setdefault(why, []).append(point.name)
    for (share_of, rules), names in reasons.items():
        warn(f"predicted: {share_of} are read off the ANE ({rules}) with {', '.join(names)}")
    if verbose:
        for point in known:
            said = " | ".join(" ".join(answer.text.split())[:60] for answer in point.smoke)
            say(f"{point.name}: {said}")
    for path in result.files:
        say(f"wrote {path}")
    if result.chosen is None:
        smallest = min(point.weight_bytes for point in known) + result.table_bytes
        usual = "" if result.budget_asked else ", which is the size without --budget"
        advice = "raise --budget" if result.budget_asked else "name a --budget"
        say_wrapped(
            f"no point has at most {megabytes(result.budget_bytes)}{usual}; the smallest has "
            f"{megabytes(smallest)}: {advice}"
        )
    else:
        say(f"chosen: {result.chosen.name}")
        off = asked["--chip"] is not None and result.chosen.predicted.weights_off_ane > 0
        say_next("port", model, options={"-r": result.recipe, **asked, ALLOW_OFF_ANE: off})


def row(point: Point, chosen: str | None, tables: int) -> list[str]:
    """A point as a row of the table. `tables` are the bytes of the host's tables."""
    right = sum(answer.expected for answer in point.smoke if answer.expected is not None)
    asked = sum(answer.expected is not None for answer in point.smoke)
    return [
        f"{point.name} (chosen)" if point.key == chosen else point.name,
        f"{(point.weight_bytes + tables) / 1e6:.1f}", f"{point.bits_per_weight:.2f}",
        f"{point.perplexity:.2f}", f"{point.kl:.4f}", f"{point.top1:.1%}", f"{right}/{asked}",
        f"{point.predicted.tok_s:.0f}",
    ]  # fmt: skip
