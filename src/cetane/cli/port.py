"""cetane port: plan, build and gates in one command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.crew import crew
from cetane.cli.options import (
    Adapters,
    Bits,
    Context,
    Force,
    ForChip,
    Json,
    Lora,
    Model,
    OsNumber,
    Output,
    Quality,
    Rebuild,
    RecipeName,
    Scheduler,
    Settings,
    StoreUrl,
    Verbose,
    Workers,
    parse_adapters,
    parse_changes,
)
from cetane.cli.output import (
    command,
    conclude,
    console,
    progress,
    say_bundle,
    say_next,
    say_next_run,
    say_wrapped,
    show_warnings,
    verdict,
    warn,
    warn_wrapped,
)

if TYPE_CHECKING:
    from cetane.gates.explain import Explanation
    from cetane.pipeline.port_result import PortResult

NO_WRONG_OP = ("compression", "weights")
"""Causes of a red gate where cetane diff finds no op: the explanation says all there is."""
RequireResidency = Annotated[
    bool | None,
    typer.Option(
        help="Refuse what is not predicted to run on the chip's ANE.",
        show_default="if --chip is given",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that weights and tables may take, as 300MB."),
]
Text = Annotated[
    Path | None,
    typer.Option(help="With few bits: a text like what the port will read, to fit weights on."),
]
Fix = Annotated[
    bool,
    typer.Option("--fix", help="If a gate is red, change the recipe as it advises, and go on."),
]


def port(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    context: Context = None,
    bits: Bits = None,
    settings: Settings = None,
    lora: Lora = None,
    adapter: Adapters = None,
    chip: ForChip = None,
    os: OsNumber = None,
    require_residency: RequireResidency = None,
    quality: Quality = None,
    budget: Budget = None,
    text: Text = None,
    fix: Fix = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: StoreUrl = None,
    rebuild: Rebuild = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Port a model: build it, and prove that it is right.

    cetane first chooses the values that the recipe leaves to it. It judges the first shard of every
    kind before it makes the others. After an interruption, run it again: it resumes. Exit code 1
    when a gate fails.
    """
    started = time.monotonic()
    with progress("plan"):  # which imports for seconds
        from cetane.cli.plan_tables import show as show_plan
        from cetane.gates.residency.target import DEFAULT_OS
        from cetane.pipeline.request import make_request

        changes = ({} if quality is None else {"quality": quality}) | parse_changes(settings)
        request = make_request(
            model, recipe, context, bits, changes, budget, lora, parse_adapters(adapter), text
        )
        from cetane.pipeline.plan import planner_for
        from cetane.pipeline.port import port_request, residency_for

        asked = residency_for(chip, os or DEFAULT_OS, require_residency)
        plan = planner_for(request, asked.target if asked.named else None).plan()
    if not json:
        show_plan(plan, chip, tables=verbose)
        if request.warning:
            show_warnings([request.warning])
    with crew(workers, scheduler, store, rebuild) as opened, progress("port") as update:
        result = port_request(
            request, output, residency=asked, fix=fix, force=force, rebuild=rebuild,
            workers=opened, progress=update,
        )  # fmt: skip
    seconds = time.monotonic() - started
    conclude(result, json, lambda outcome: show(outcome, seconds, asked.named, fix, verbose))


def show(result: PortResult, seconds: float, named: bool, fix: bool, verbose: bool) -> None:
    """Print the choices, a line for every gate, the predicted speed, and the next command.

    The command took `seconds`. `named` says whether the user named the chip, and `fix` whether
    advice was to be taken.
    """
    from cetane.cli.forecast import headline
    from cetane.cli.gate_tables import show_checks, show_golden, summary
    from cetane.schema.changes import value_of

    reasons = result.plan.recipe.reasons
    for reason in dict.fromkeys(reasons.values()):
        keys = [key for key in reasons if reasons[key] == reason]
        values = [f"{key} = {value_of(result.plan.recipe, key)}" for key in keys]
        say_wrapped(f"chosen: {', '.join(values)}")
        for line in reason.split("; "):
            say_wrapped(f"  {line}")
    for change in result.changes:
        say_wrapped(f"changed: {change}")
    if result.refused is not None:
        warn(f"nothing else was tried: {result.refused}")
    show_residency(result, named)
    if result.ladder is not None:
        if verbose or not result.ladder.passed:
            show_checks("first shard of every kind", result.ladder.checks)
        console.print(f"first shards: {summary(result.ladder)}", soft_wrap=True)
    if result.bundle is None:
        show_mend(result.explanation, fix)
        if result.off_the_ane:
            warn("so nothing more was built; --no-require-residency builds it nevertheless")
        else:
            warn(
                "the first shards failed, so the others were not built; "
                "after mending the cause, run again with --rebuild"
            )
        return
    assert result.golden is not None
    show_golden(result.golden, verbose)
    show_mend(result.explanation, fix)
    say_wrapped(f"speed, predicted: {headline(result.forecast)}")
    path = result.bundle.path
    say_bundle(result.bundle, result.kept, f" in {seconds:.0f} s")
    if result.passed:
        say_next_run(path)
    elif result.golden.passed:  # only residency is red
        say_next(*audit_words(result))
    elif result.explanation is None or result.explanation.cause not in NO_WRONG_OP:
        say_next("diff", path, "--model", result.bundle.manifest.source)


def show_mend(why: Explanation | None, fix: bool) -> None:
    """Print why a gate is red, the change that mends it, and the option that makes this change."""
    from cetane.cli.gate_tables import show_why

    show_why(why)
    if why is not None and why.mends and not fix:
        say_wrapped("the same command with --fix makes this change, and goes on")


def show_residency(result: PortResult, named: bool) -> None:
    """Print what keeps the first shards off the ANE. Without a named chip it is only a warning."""
    audit = result.residency
    if audit is None:
        return
    judged = f"residency, {audit.basis} for {audit.target}"
    if result.residency_required or audit.passed:
        console.print(f"{judged}: {verdict(audit.passed)}")
    if audit.passed:
        return
    if audit.tiny:
        say_wrapped(f"{judged}: so small a model stays on the CPU, by the rule tiny-program")
    why = result.explanation
    explained = why is not None and why.cause == "residency"
    for reason in audit.reasons[explained:]:  # the explanation tells the first
        warn_wrapped(f"{judged}: {reason}")
    if not named:
        say_wrapped(
            "no chip is named, so residency decides nothing: --chip a19-pro makes it a gate"
        )
    elif not result.residency_required:
        say_wrapped("residency decides nothing: --no-require-residency")
    if result.bundle is not None:
        warn(f"  for details: {command(*audit_words(result))}")


def audit_words(result: PortResult) -> tuple[object, ...]:
    """The words of the command that audits a finished bundle for the judged chip."""
    assert result.bundle is not None and result.residency is not None
    target = result.residency.target
    return "audit", result.bundle.path, "--chip", target.chip, "--os", f"{target.os:g}"
