"""The residency of a package's or a bundle's ops: predicted by rules, or measured on a Mac."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cetane.files import Progress, silent
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.measured import Measured, audit_for, measure, read_measured
from cetane.gates.residency.store import UNWRITTEN, open_artifact
from cetane.mil import load


@dataclass(frozen=True)
class ResidencyResult:
    """An audit, and the measurements that it used."""

    audit: Audit
    measured: Measured | None
    note: str | None = None
    """Why measurements were not used, or are not kept."""

    @property
    def passed(self) -> bool:
        return self.audit.passed

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for a failure; empty if it passed."""
        return self.audit.reasons

    def as_json(self) -> dict[str, Any]:
        """Every function, op and finding as a JSON object."""
        audit = self.audit
        return {
            "target": asdict(audit.target),
            "basis": audit.basis,
            "measured": None if self.measured is None else str(self.measured),
            "note": self.note,
            "passed": audit.passed,
            "reasons": audit.reasons,
            "functions": [
                {
                    "package": function.package,
                    "function": function.function,
                    "shape": function.variant or "as made",
                    "tokens": function.tokens,
                    "table": function.table(),
                    "findings": [asdict(finding) for finding in function.findings],
                    "ops": [asdict(op) for op in function.ops],
                }
                for function in audit.functions
            ],
            "findings": [asdict(finding) for finding in audit.findings],
        }


def audit(
    path: str | Path,
    *,
    chip: str | None = None,
    os: float | None = None,
    measured: Path | None = None,
    measuring: bool = False,
    progress: Progress = silent,
) -> ResidencyResult:
    """Audit a .mlpackage or a bundle for a chip and a system; `os` is the iOS number.

    `measured` is a file of measurements; they win over predictions. By default it is the file
    beside the package, or the bundle's own, if there is one. `measuring` measures on this Mac and
    keeps the result there. Measurements count for their own chip and system alone, which are also
    the default for `chip` and `os`; without any these are m4-max and 26. A bundle keeps the
    verdict. CetaneError if `path` is neither a package nor a bundle.

    >>> cetane.audit(bundle).audit.basis
    'predicted'
    """
    artifact, programs = open_artifact(Path(path)), {}
    for done, (name, package) in enumerate(artifact.packages.items()):
        progress(name, done, len(artifact.packages))
        programs[name] = load(package)
    if measuring:
        kept: Measured | None = measure(artifact.packages)
    else:
        kept = read_measured(measured) if measured else artifact.measured()
    outcome, unused = audit_for(chip, os, programs, artifact.packages, kept)
    unkept = kept is not None and (measuring or measured) and not artifact.keep(kept)
    artifact.judge(outcome)
    notes = [note for note in (unused, UNWRITTEN if unkept else None) if note]
    return ResidencyResult(outcome, None if unused else kept, "; ".join(notes) or None)
