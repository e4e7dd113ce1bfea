"""cetane port: plan, build and gates in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.cli.options import (
    Bits,
    Context,
    Force,
    Json,
    Model,
    Output,
    Rebuild,
    RecipeName,
    Settings,
    Verbose,
)
from cetane.cli.output import conclude, console, megabytes, progress, say, verdict, warn

if TYPE_CHECKING:
    from cetane.pipeline.port import PortResult


def port(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    context: Context = None,
    bits: Bits = None,
    settings: Settings = None,
    rebuild: Rebuild = False,
    force: Force = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Port a model: plan it, build it, and prove that the result is right.

    The first shard of every kind is judged before the others are made. After an interruption, run
    it again: it resumes. Exit code 1 when a gate fails.
    """
    from cetane.cli.plan_tables import show as show_plan
    from cetane.pipeline.port import port_request
    from cetane.pipeline.request import make_request, read_changes

    with progress("plan"):
        request = make_request(model, recipe, context, bits, read_changes(settings or []))
        plan = request.planner.plan()
    if not json:
        show_plan(plan, tables=verbose)
        if request.warning:
            warn(f"warning: {request.warning}")
    with progress("port") as update:
        result = port_request(request, output, force=force, rebuild=rebuild, progress=update)
    conclude(result, json, lambda outcome: show(outcome, verbose))


def show(result: PortResult, verbose: bool) -> None:
    """Print a line for every gate, the predicted speed, and the next command."""
    from cetane.cli.forecast import headline
    from cetane.cli.gate_tables import show_checks, show_golden, show_why, summary

    if result.ladder is not None:
        if verbose or not result.ladder.passed:
            show_checks("first shard of every kind", result.ladder.checks)
        console.print(f"first shards: {summary(result.ladder)}", soft_wrap=True)
    show_residency(result)
    if result.bundle is None:
        warn(
            "the first shards failed, so the others were not built; "
            "after mending the cause, run again with --rebuild"
        )
        return
    assert result.golden is not None
    show_golden(result.golden, verbose)
    show_why(result.explanation)
    say(f"speed, predicted: {headline(result.forecast)}")
    size = sum(record.bytes for record in result.bundle.manifest.files.values())
    say(f"wrote {result.bundle.path}: {megabytes(size)} in {sum(result.seconds.values()):.0f} s")
    if result.passed:
        say(f"next: cetane run {result.bundle.path} --chat")
    else:
        say(f"next: cetane diff {result.bundle.path} --model {result.bundle.manifest.source}")


def show_residency(result: PortResult) -> None:
    """Print what keeps the first shards off the ANE: only a warning, since it is predicted."""
    audit = result.residency
    if audit is None:
        return
    if audit.passed:
        console.print(f"residency, {audit.basis} for {audit.target}: {verdict(True)}")
    if all("tiny-program" in {hit.rule for hit in one.findings} for one in audit.functions):
        say("residency, predicted: such a small model stays on the CPU (rule tiny-program)")
        return
    for reason in audit.reasons:
        warn(f"warning: residency on {audit.target}, {audit.basis}: {reason}")
    if audit.reasons:
        warn("  for details: cetane audit BUNDLE")
