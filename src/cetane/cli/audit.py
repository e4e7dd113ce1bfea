"""cetane audit: where the ops of a package or a bundle will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.cli.output import Json, console, print_json, table
from cetane.errors import CetaneError
from cetane.gates.residency.audit import Audit, Finding, FunctionAudit
from cetane.gates.residency.audit import audit as examine
from cetane.gates.residency.docs import explained, markdown
from cetane.gates.residency.measured import Measured, measure, read_measured, with_measured
from cetane.gates.residency.rule import find, load_rules
from cetane.gates.residency.store import open_artifact
from cetane.gates.residency.target import DEFAULT_OS, Target
from cetane.hardware.chips import DEFAULT_CHIP
from cetane.mil.reader import load

ORDER = ("fatal", "silent", "risk", "perf", "info")


def audit(
    path: Annotated[
        Path | None, typer.Argument(metavar="PACKAGE|BUNDLE", help="What to audit.")
    ] = None,
    chip: Annotated[str, typer.Option(help="The chip it is for, as m4-max or a19-pro.")] = (
        DEFAULT_CHIP
    ),
    os: Annotated[float, typer.Option(help="The system's number, as iOS counts.")] = DEFAULT_OS,
    measured: Annotated[
        Path | None, typer.Option(help="What --measure wrote on a Mac; it wins over predictions.")
    ] = None,
    measuring: Annotated[
        bool, typer.Option("--measure", help="Ask this Mac's Core ML, and keep what it says.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(help="Say what a rule means, and its sources.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules.")] = False,
    page: Annotated[bool, typer.Option("--markdown", help="With --rules: as a page.")] = False,
    json: Json = False,
) -> None:
    """Show where every op runs, on the ANE or elsewhere, and why; no Mac needed.

    Exit code 1 when a program does not run, leaves the ANE, or gives wrong numbers.
    """
    if explain is not None or rules:
        tell(explain, page, json)
        return
    if path is None:
        raise CetaneError("cetane audit: name a package or a bundle", "or --rules, --explain RULE")
    artifact = open_artifact(path)
    found = examine({n: load(p) for n, p in artifact.packages.items()}, Target(chip, os))
    kept = measure(artifact.packages) if measuring else (
        read_measured(measured) if measured else artifact.measured()
    )  # fmt: skip
    if kept is not None:
        found = with_measured(found, kept, artifact.packages)
        artifact.keep(kept)
    content = as_json(found, kept)
    artifact.judge(found)
    if json:
        print_json(content)
    else:
        show(found, kept)
    raise typer.Exit(0 if found.passed else 1)


def tell(explain: str | None, page: bool, json: bool) -> None:
    """Print what is known: one rule, or all of them."""
    if explain is not None:
        known = find(explain)
        if json:
            print_json(known.model_dump(mode="json"))
        else:
            console.print(explained(known), markup=False, soft_wrap=True, highlight=False)
    elif page:
        print(markdown(), end="")
    elif json:
        print_json([rule.model_dump(mode="json") for rule in load_rules().values()])
    else:
        rows = [
            [r.severity, r.id, r.placement or "", r.confidence, r.title]
            for r in sorted(load_rules().values(), key=lambda r: ORDER.index(r.severity))
        ]
        table("rules", ["severity", "rule", "placement", "confidence", "what"], rows)


def as_json(found: Audit, measured: Measured | None) -> dict[str, Any]:
    return {
        "target": asdict(found.target),
        "basis": found.basis,
        "measured": None if measured is None else str(measured),
        "passed": found.passed,
        "reasons": found.reasons,
        "functions": [
            {
                "package": function.package,
                "function": function.function,
                "shape": function.variant or "as made",
                "tokens": function.tokens,
                "table": function.table(),
                "findings": [asdict(f) for f in function.findings],
                "ops": [asdict(op) for op in function.ops],
            }
            for function in found.functions
        ],
        "findings": [asdict(f) for f in found.findings],
    }


def show(found: Audit, measured: Measured | None) -> None:
    """Print a table in the seeds' terms, what placed the ops, what was found, and the verdict."""
    show_counts(found)
    placed = Counter(
        op.rule for f in found.functions for op in f.ops if op.measured is None
    )  # fmt: skip
    if placed:
        by = ", ".join(f"{rule} {count}" for rule, count in placed.most_common())
        console.print(f"ops placed by (predicted): {by}", markup=False, highlight=False)
    if measured is not None:
        compare(found.functions, measured)
    show_findings(found)
    verdict = "[bold green]pass[/]" if found.passed else "[bold red]FAIL[/]"
    console.print(f"residency, {found.basis}: {verdict}")
    for reason in found.reasons:
        console.print(f"  {reason}", markup=False, soft_wrap=True)
    console.print("[dim]sources: cetane audit --explain RULE[/]", soft_wrap=True)


def show_counts(found: Audit) -> None:
    """A row for every function at every shape; those with equal numbers share one."""
    counts = [(function, function.table()) for function in found.functions]
    always = ("conv_total", "conv_ane", "conv_non_ane", "ops", "ops_ane", "ops_cpu")
    columns = [
        name for name in (counts[0][1] if counts else {})
        if name in always or any(row[name] for _, row in counts)
    ]  # fmt: skip
    alike: dict[tuple[Any, ...], list[str]] = {}
    for function, row in counts:
        name = f"{function.package}/{function.function}"
        shape = f" at {function.variant}" if function.variant else ""
        key = (shape, function.tokens, *(row[name] for name in columns))
        alike.setdefault(key, []).append(name)
    rows = [
        [names[0] + shape + (f" and {len(names) - 1} alike" if len(names) > 1 else ""), *numbers]
        for (shape, *numbers), names in alike.items()
    ]
    title = f"residency for {found.target}: {found.basis}"
    short = {"ops_ane": "ANE", "ops_cpu": "CPU"}
    heads = [short.get(name, name.removeprefix("ops_")) for name in columns]
    table(title, ["function", "T", *heads], rows)


def compare(functions: Sequence[FunctionAudit], measured: Measured) -> None:
    """Print where prediction and measurement differ."""
    pairs = Counter(
        (op.kind, op.placement, op.measured, op.rule)
        for function in functions for op in function.ops if op.measured is not None
    )  # fmt: skip
    differing = Counter({pair: n for pair, n in pairs.items() if pair[1] != pair[2]})
    agreed = pairs.total() - differing.total()
    line = f"measured on {measured}: {agreed} of {pairs.total()} ops as predicted"
    console.print(line, markup=False, soft_wrap=True)
    if differing:
        columns = ["op", "predicted", "measured", "predicted by", "ops"]
        table("predicted otherwise", columns, [[*key, n] for key, n in differing.most_common(20)])


def show_findings(found: Audit) -> None:
    """Print every rule that applies, the worst first."""
    hits: dict[str, list[tuple[Finding, str]]] = {}
    for function in found.functions:
        for finding in function.findings:
            place = f"{function.package}/{function.function}"
            hits.setdefault(finding.rule, []).append((finding, place))
    for finding in found.findings:
        hits.setdefault(finding.rule, []).append((finding, "all packages"))
    for rule, places in sorted(hits.items(), key=lambda hit: ORDER.index(hit[1][0][0].severity)):
        first, where = places[0]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        placed = f"{first.placement}, " if first.placement else ""
        for line in (
            f"{first.severity}: {rule} (predicted: {placed}confidence {first.confidence}), "
            f"{where}{more}",
            f"  {first.details[0]}: {first.message}",
            f"  fix: {first.fix}",
        ):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
