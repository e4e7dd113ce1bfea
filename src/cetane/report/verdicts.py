"""The verdicts of a bundle's gates, as its page shows them."""

from collections.abc import Iterator
from typing import Any

from cetane.gates.limits import OTHER_LIMITS, limits_digest
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.store import GATE, MEASURED
from cetane.gates.verdict import Check
from cetane.kit.device import DeviceResult
from cetane.report.content.verdicts import GateVerdict, OutcomeWord
from cetane.report.gate_results import MAKERS, GateResults, command

QUESTIONS = {
    "golden": "Does the whole chain agree with the reference, in every mode?",
    "ladder": "Does the first shard of every kind agree, each alone?",
    "perplexity": "Does it predict a text as well as the reference?",
    "residency": "Will every op run on the Neural Engine?",
}
FURTHER = {
    "device": "Does a device compute what the programs should?",
    "golden": "Does the draft head agree with the one that torch trained?",
    "residency": "Will every op of the draft head run on the Neural Engine?",
    "static": "Are the packages what the manifest says?",
}
"""Questions of gates that only some bundles have. A draft head's gates are named `GATE-HEAD`."""


def verdicts(gates: GateResults, audit: Audit, unused: str | None) -> Iterator[GateVerdict]:
    """The gates that every bundle should pass, then other gates with a verdict. `unused` says why
    the audit has no measurements."""
    for gate in QUESTIONS:
        yield verdict(gates, gate, audit, unused)
    for gate, result in gates.results.items():
        if gate not in QUESTIONS and gate != MEASURED and isinstance(result.get("passed"), bool):
            yield verdict(gates, gate, audit, unused)


def verdict(gates: GateResults, gate: str, audit: Audit, unused: str | None) -> GateVerdict:
    """One gate's verdict. Residency is judged again: it takes no time, and rules improve."""
    notes: list[str] = []
    checks: list[Check] = []
    result: dict[str, Any] = gates.results.get(gate, {})
    outcome, basis = outcome_word(result.get("passed")), "measured"
    match gate:
        case "golden" if (golden := gates.golden) is not None:
            checks = list(golden.checks)
            notes = list(golden.warnings)
            if golden.limits != limits_digest():
                notes.append(OTHER_LIMITS)
        case "ladder" if (ladder := gates.ladder) is not None:
            checks = list(ladder.checks)
        case "device" if (device := gates.read(gate, DeviceResult)) is not None:
            checks = list(device.checks)
            notes = [f"{device.machine}, {device.date}", *device.faults]
        case "perplexity" if (judged := gates.perplexity) is not None:
            quality, _ = judged
            checks = [Check(name="perplexity, times the reference's", value=quality.ratio,
                            limit=quality.limit, passed=quality.passed)]  # fmt: skip
            notes = list(quality.warnings)
        case _ if gate == GATE:
            outcome, basis = outcome_word(audit.passed), audit.basis
            notes = [*audit.reasons, *([unused] if unused else [])]
        case _:
            basis = str(result.get("basis", basis))
    return GateVerdict(
        gate=gate,
        question=QUESTIONS.get(gate, FURTHER.get(gate.partition("-")[0], "")),
        outcome=outcome,
        basis=basis,
        command=command(gate, gates.bundle.path),
        repeatable=gate not in MAKERS,
        date=gates.date(gate),
        notes=tuple(notes),
        held=sum(check.passed for check in checks),
        count=len(checks),
        checks=tuple(checks),
    )


def outcome_word(passed: object) -> OutcomeWord:
    """The word for a gate's `passed`; None stands for a gate that did not run."""
    return "not run" if passed is None else "passed" if passed is True else "failed"
