"""What Xcode or Core ML's cache said of a package, read in: its residency becomes measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.measured import with_kept, with_measured
from cetane.gates.residency.refuted import Refuted, refuted
from cetane.gates.residency.store import UNWRITTEN, open_artifact
from cetane.kit.analytics import read_analytics
from cetane.kit.package_report import PackageReport, as_measured
from cetane.kit.xcode import read_report
from cetane.mil import load
from cetane.pipeline.import_kit import other_units


@dataclass(frozen=True)
class XcodeImport:
    """What Xcode or Core ML's cache said of a package."""

    package: str
    told: PackageReport
    audit: Audit
    """Measured, or predicted if the file is not kept."""
    rules: tuple[Refuted, ...]
    note: str | None = None
    """Why it is not kept."""

    @property
    def passed(self) -> bool:
        return self.audit.passed

    def as_json(self) -> dict[str, Any]:
        return {
            "package": self.package,
            "passed": self.passed,
            "basis": self.audit.basis,
            "told": self.told.model_dump(mode="json", exclude={"functions"}),
            "functions": {
                f"{function.package}/{function.function}": function.table()
                for function in self.audit.functions
                if function.package == self.package
            },
            "rules": [rule.model_dump(mode="json") for rule in self.rules],
            "note": self.note,
        }


def import_xcode(file: str | Path, artifact: str | Path, date: str) -> XcodeImport:
    """Read an `.mlperf` folder or an `analytics.mil` into a bundle or a package.

    `date` is the file's day, as "2026-01-31". CetaneError if the file is of another package.
    """
    path, opened = Path(file), open_artifact(Path(artifact))
    told = read_report(path) if path.is_dir() else read_analytics(path)
    programs = {name: load(package) for name, package in opened.packages.items()}
    measured = as_measured(told, programs, opened.packages, date)
    package = next(iter(measured.packages))
    predicted = audit(programs, measured.target)
    if (unkept := other_units(told.compute_units)) is not None:
        return XcodeImport(package, told, predicted, (), unkept)
    joined = with_kept(measured, opened.measured())
    placed = with_measured(predicted, joined, opened.packages)
    note = None if opened.keep(joined) else UNWRITTEN
    opened.judge(placed)
    return XcodeImport(package, told, placed, tuple(refuted(placed)), note)
