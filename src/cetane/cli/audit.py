"""cetane audit: where the ops of a package or a bundle will run."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.options import Json, MeasuredChip, MeasuredOs, Verbose, refuse
from cetane.cli.output import conclude, console, print_json, progress, say, table
from cetane.errors import CetaneError

ORDER = ("fatal", "silent", "risk", "perf", "info")


PathOption = Annotated[
    Path | None, typer.Argument(metavar="PACKAGE|BUNDLE", help="The package or bundle to audit.")
]
MeasuredOption = Annotated[
    Path | None,
    typer.Option(help="The file that --measure wrote on a Mac; it wins over predictions."),
]
MeasuringOption = Annotated[
    bool, typer.Option("--measure", help="Ask this Mac's Core ML, and keep the answer.")
]
ExplainOption = Annotated[str | None, typer.Option(help="Explain a rule, with its sources.")]


def audit(
    path: PathOption = None,
    chip: MeasuredChip = None,
    os: MeasuredOs = None,
    measured: MeasuredOption = None,
    measuring: MeasuringOption = False,
    explain: ExplainOption = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules.")] = False,
    page: Annotated[bool, typer.Option("--markdown", help="With --rules: as a page.")] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show where every op runs, on the ANE or elsewhere.

    It predicts this from rules, says why, and needs no Mac. Exit code 1 when a program does not
    run, leaves the ANE, or gives wrong numbers.
    """
    from cetane.cli.audit_tables import show
    from cetane.pipeline.audit import audit as examine

    if explain is not None or rules:
        given = {
            "PACKAGE|BUNDLE": path, "--chip": chip, "--os": os, "--measured": measured,
            "--measure": measuring, "--verbose": verbose,
        }  # fmt: skip
        refuse("does nothing with --rules or --explain", given)
        refuse("does nothing with --rules", {"--explain": explain and rules})
        refuse("is for --rules, without --json", {"--markdown": page and (json or not rules)})
        show_rules(explain, page, json)
        return
    refuse("is for --rules", {"--markdown": page})
    if path is None:
        raise CetaneError(
            "cetane audit needs a package or a bundle", "or use --rules or --explain RULE"
        )
    with progress("audit") as update:
        result = examine(
            path, chip=chip, os=os, measured=measured, measuring=measuring, progress=update
        )
    conclude(result, json, lambda outcome: show(outcome, verbose))


def show_rules(explain: str | None, page: bool, json: bool) -> None:
    """Print one rule, or all rules."""
    from cetane.gates.residency.docs import explained, markdown
    from cetane.gates.residency.rule import find, load_rules

    if explain is not None:
        known = find(explain)
        if json:
            print_json(known.model_dump(mode="json"))
        else:
            console.print(explained(known), markup=False)
    elif page:
        print(markdown(), end="")
    elif json:
        print_json([rule.model_dump(mode="json") for rule in load_rules().values()])
    else:
        known_rules = sorted(load_rules().values(), key=lambda r: ORDER.index(r.severity))
        rows = [[r.severity, r.id, r.placement or "", r.confidence, r.title] for r in known_rules]
        table("rules", ["severity", "rule", "placement", "confidence", "what"], rows)
        say("sources: cetane audit --explain RULE")
