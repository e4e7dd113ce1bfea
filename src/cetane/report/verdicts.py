"""The verdicts of a bundle's gates, and the command that runs each gate."""

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from cetane.bundle import Bundle
from cetane.gates.golden_result import GoldenResult
from cetane.gates.ladder import LadderResult
from cetane.gates.limits import OTHER_LIMITS, limits_digest
from cetane.gates.quality import TextQuality
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.store import GATE, MEASURED
from cetane.gates.verdict import Check
from cetane.kit.device import DeviceResult
from cetane.report.content.verdicts import GateVerdict, OutcomeWord
from cetane.schema.manifest import GATES
from cetane.validation import validated

Result = TypeVar("Result", bound=BaseModel)
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

MAKERS = {"ladder": "cetane port", "activations": "cetane quantize-activations"}
"""Commands that judge a bundle by these gates while they make it, and never after."""


class Gates:
    """The stored results of a bundle's gates."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.results = bundle, bundle.gates()

    @property
    def golden(self) -> GoldenResult | None:
        return self.read("golden", GoldenResult)

    @property
    def ladder(self) -> LadderResult | None:
        return self.read("ladder", LadderResult)

    @property
    def perplexity(self) -> tuple[TextQuality, str] | None:
        """The result, and the name of the text."""
        kept = self.results.get("perplexity")
        if kept is None:
            return None
        quality = self.read("perplexity", TextQuality, "text")
        return None if quality is None else (quality, str(kept.get("text", "a text")))

    def read(self, gate: str, kind: type[Result], *without: str) -> Result | None:
        """A gate's result. Raises CetaneError if the file is not a result of this gate."""
        kept = self.results.get(gate)
        if kept is None:
            return None
        content = {key: value for key, value in kept.items() if key not in without}
        again = "make the bundle" if gate in MAKERS else "run it"
        hint = f"{again} again: {command(gate, self.bundle.path)}"
        return validated(kind, content, str(self.file(gate)), hint)

    def file(self, gate: str) -> Path:
        return self.bundle.file(f"{GATES}/{gate}.json")

    def date(self, gate: str) -> str | None:
        """The time of a gate's result."""
        return changed_at(self.file(gate)) if gate in self.results else None


def command(gate: str, bundle: Path) -> str:
    """The command that runs a gate, also a draft head's `GATE-HEAD`."""
    path = shlex.quote(str(bundle))
    commands = MAKERS | {
        "golden": f"cetane validate {path}",
        "static": f"cetane validate {path}",
        "layers": f"cetane validate {path} --full",
        "perplexity": f"cetane validate {path} --perplexity TEXT",
        "residency": f"cetane audit {path}",
        "evaluation": f"cetane eval {path} --against reference",
        "device": f"cetane import measurements.json {path}",
    }
    return commands.get(gate.partition("-")[0], f"cetane info {path}")


def verdicts(gates: Gates, audit: Audit, unused: str | None) -> Iterator[GateVerdict]:
    """The gates that every bundle should pass, then other gates with a verdict. `unused` says why
    the audit has no measurements."""
    for gate in QUESTIONS:
        yield verdict(gates, gate, audit, unused)
    for gate, result in gates.results.items():
        if gate not in QUESTIONS and gate != MEASURED and isinstance(result.get("passed"), bool):
            yield verdict(gates, gate, audit, unused)


def verdict(gates: Gates, gate: str, audit: Audit, unused: str | None) -> GateVerdict:
    """One gate's verdict. Residency is judged again: it takes no time, and rules improve."""
    notes: list[str] = []
    checks: list[Check] = []
    result: dict[str, Any] = gates.results.get(gate, {})
    outcome, basis = said(result.get("passed")), "measured"
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
            outcome, basis = said(audit.passed), audit.basis
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


def said(passed: object) -> OutcomeWord:
    return "not run" if passed is None else "passed" if passed is True else "failed"


def changed_at(path: Path) -> str:
    """The time of a file's last change, in UTC, to the minute."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
