"""Tables of an audit: the number of ops by place, the findings and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cetane.cli.audit import ORDER
from cetane.cli.output import console, facts, say, say_wrapped, table, verdict, warn

if TYPE_CHECKING:
    from cetane.gates.residency.audit import Audit, Finding, FunctionAudit
    from cetane.gates.residency.measured import Measured
    from cetane.pipeline.audit import ResidencyResult

PLACES = ("ANE", "CPU", "unknown", "fails", "wrong")


def show(result: ResidencyResult, verbose: bool) -> None:
    """Print the places of ops, differing measurements, the findings and the verdict."""
    audit = result.audit
    show_places(audit, verbose)
    if result.measured is not None:
        show_measured(audit.functions, result.measured)
    if result.note is not None:
        warn(f"note: {result.note}")
    show_findings(audit)
    console.print(f"residency, {audit.basis}: {verdict(audit.passed)}")
    for reason in audit.reasons:
        say_wrapped(f"  {reason}")
    say("sources: cetane audit --explain RULE")


def show_places(audit: Audit, verbose: bool) -> None:
    """Print a row for every function at every shape, and the kinds of ops without a place.
    Functions with equal numbers share a row."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for function in audit.functions:
        counts = function.table()
        shape = f" at {function.variant}" if function.variant else ""
        places = tuple(counts.get(f"ops_{place}", counts.get(place, 0)) for place in
                       ("ane", "cpu", "unknown", "fail", "wrong"))  # fmt: skip
        convs = f"{counts['conv_ane']}/{counts['conv_total']}"
        key = (shape, function.tokens, convs, counts["ops"], *places)
        alike.setdefault(key, []).append(f"{function.package}/{function.function}")
    keys = list(alike)
    shown = [at for at in range(len(PLACES)) if at == 0 or any(key[4 + at] for key in keys)]
    rows = [
        [named(alike[key], str(key[0])), *key[1:4], *(key[4 + at] for at in shown)] for key in keys
    ]
    columns = ["function", "T", "convs on ANE", "ops", *(PLACES[at] for at in shown)]
    table(f"residency for {audit.target}: {audit.basis}", columns, rows)
    unknown = Counter(op.kind for f in audit.functions for op in f.ops if op.final == "unknown")
    if unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in unknown.most_common())
        say_wrapped(f"no report says where these ops run, so the verdict leaves them out: {kinds}")
    placed = Counter(op.rule for f in audit.functions for op in f.ops if op.measured is None)
    if placed and verbose:
        facts(dict(placed.most_common()), "ops placed by (predicted)")


def named(functions: Sequence[str], shape: str) -> str:
    """The name of the first function, and the number of functions like it."""
    return functions[0] + shape + (f" and {len(functions) - 1} alike" if functions[1:] else "")


def show_measured(functions: Sequence[FunctionAudit], measured: Measured) -> None:
    """Print the ops whose prediction and measurement differ."""
    pairs = Counter(
        (op.kind, op.placement, op.measured, op.rule)
        for function in functions for op in function.ops if op.measured is not None
    )  # fmt: skip
    differing = Counter({pair: n for pair, n in pairs.items() if pair[1] != pair[2]})
    agreed = pairs.total() - differing.total()
    say(f"measured on {measured}: {agreed} of {pairs.total()} ops as predicted")
    if differing:
        columns = ["op", "predicted", "measured", "predicted by", "ops"]
        table("predicted otherwise", columns, [[*key, n] for key, n in differing.most_common(20)])


def show_findings(audit: Audit) -> None:
    """Print every rule that applies, the worst first."""
    hits: dict[str, list[tuple[Finding, str]]] = {}
    for function in audit.functions:
        for finding in function.findings:
            place = f"{function.package}/{function.function}"
            hits.setdefault(finding.rule, []).append((finding, place))
    for finding in audit.findings:
        hits.setdefault(finding.rule, []).append((finding, "all packages"))
    for rule, places in sorted(hits.items(), key=lambda hit: ORDER.index(hit[1][0][0].severity)):
        first, where = places[0]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        placed = f"{first.placement}, " if first.placement else ""
        console.print(f"[bold]{first.severity}: {rule}[/]", soft_wrap=True)
        facts({
            "where": f"{where}{more}",
            "predicted": f"{placed}confidence {first.confidence}",
            "because": f"{first.details[0]}: {first.message}",
            "fix": first.fix,
        })  # fmt: skip
