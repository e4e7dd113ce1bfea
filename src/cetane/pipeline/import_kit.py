"""A Mac's record, read into the bundles that the Mac measured.

Residency becomes measured, the device gate is judged, and the cost model gets evidence. A record is
kept only of a Mac with a Neural Engine, on `KEPT_UNITS`. Any other record is judged and shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.measured import (
    Measured,
    MeasuredFunction,
    MeasuredPackage,
    specification,
    with_measured,
)
from cetane.gates.residency.refuted import refuted
from cetane.gates.residency.store import UNWRITTEN, InBundle
from cetane.gates.residency.target import target_of
from cetane.hardware.chips import Chip, chip_named
from cetane.kit.device import DEVICE, DeviceResult
from cetane.kit.evidence_rows import EvidenceRow, evidence_rows, write_rows
from cetane.kit.expectation import expected_of
from cetane.kit.judge import judge, ties
from cetane.kit.measurements import Measurements, RecordedBundle, read_measurements
from cetane.kit.plausible import check_origin, check_reason
from cetane.kit.speed import SpeedCompared, compare, figures, ratios
from cetane.measuring.energy import CAVEATS
from cetane.mil import load
from cetane.mil.program import Program
from cetane.perf.predict import Predictor
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import Planner
from cetane.schema.manifest import GATES

EVIDENCE = "device.csv"
KEPT_UNITS = "CPU_AND_NE"
"""The compute units about which the rules, the cost model and the experiments speak."""


@dataclass(frozen=True)
class KitImport:
    """A record, judged for every bundle that was given."""

    outcomes: tuple[DeviceResult, ...]
    """One of each bundle, in their order."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Bundle B's milliseconds over bundle A's, as medians of the turns."""
    names: tuple[str, ...] = ()
    """The names of the kit's bundles, A and perhaps B."""

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "outcomes": [outcome.model_dump(mode="json") for outcome in self.outcomes],
            "b_over_a": self.ratios,
        }


def import_kit(
    file: str | Path, bundles: Sequence[str | Path], *, model: str | Path | None = None
) -> KitImport:
    """Read a kit's `measurements.json` into the bundles that it measured.

    `model` is the checkpoint's new place, whose shapes the cost model needs. CetaneError for a file
    that was changed, for another bundle, and for figures beyond reason; then nothing is kept.
    """
    measurements = read_measurements(Path(file))
    opened = [Bundle(Path(path)) for path in bundles]
    if not opened:
        names = " ".join(bundle.name for bundle in measurements.bundles.values())
        raise CetaneError(
            f"{file} measured {names}: say where that is",
            f"cetane import {quote(str(file))} BUNDLE...",
        )
    for bundle in opened:
        bundle.verify()
    imports = [BundleImport(measurements, bundle, model) for bundle in opened]
    labelled = tuple(bundle.name for _, bundle in sorted(measurements.bundles.items()))
    return KitImport(tuple(one.keep() for one in imports), ratios(measurements), labelled)


def evidence_file(bundle: Bundle) -> Path:
    """The rows of evidence that imports into a bundle have written."""
    return bundle.file(f"{GATES}/{EVIDENCE}")


class BundleImport:
    """One bundle's part of a record. Making it checks everything and keeps nothing."""

    def __init__(
        self, measurements: Measurements, bundle: Bundle, model: str | Path | None
    ) -> None:
        self.measurements, self.bundle, self.model = measurements, bundle, model
        self.label = measurements.label(bundle.digest)
        self.recorded: RecordedBundle = measurements.bundles[self.label]
        self.machine = measurements.machine
        self.chip: Chip | None = chip_named(self.machine.chip)
        self.artifact = InBundle(bundle)
        # A kit measures no draft heads, but the verdict on residency is about them too.
        self.programs: dict[str, Program] = {
            name: load(path) for name, path in self.artifact.packages.items()
        }
        self.expected = expected_of(bundle)
        check_origin(self.recorded, bundle, self.programs, self.expected)
        check_reason(measurements, self.recorded, bundle.plan, self.chip)
        self.figures = figures(measurements, self.label)
        self.unkept = self.why_unkept()
        self.notes: list[str] = []

    def why_unkept(self) -> str | None:
        """Why the record is judged and not kept; None if it is kept."""
        if not self.machine.device:
            return f"{self.machine} is no Mac with a Neural Engine, so this is not kept"
        return other_units(self.measurements.options.compute_units)

    def keep(self) -> DeviceResult:
        """Keep what a device measured, and return everything."""
        recorded = self.recorded
        placed, ops = self.residency()
        checks = judge(self.measurements, recorded, self.expected, self.bundle.plan)
        passed = all(check.passed for check in checks)
        compared, rows = self.speed()
        if rows and not passed:
            self.notes.append("the gate failed, so the times are no evidence for the cost model")
            rows = []
        outcome = DeviceResult(
            name=self.bundle.path.name,
            passed=passed,
            machine=str(self.machine),
            device=self.machine.device,
            date=self.measurements.date,
            compute_units=self.measurements.options.compute_units,
            chip=None if self.chip is None else self.chip.id,
            checks=checks,
            ties=sum(ties(positions) for positions in recorded.probes.values()),
            positions=sum(map(len, recorded.probes.values())),
            figures=self.figures,
            compared=tuple(compared),
            rules=tuple(refuted(placed)),
            measured_ops=ops,
            faults=tuple(str(one) for one in self.measurements.faults if self.is_own(one.job)),
            refusals=self.refused(),
            rows=len(rows),
            caveats=CAVEATS if self.figures.joules_per_token is not None else (),
            notes=tuple(self.notes),
        )
        if self.unkept is not None:
            return outcome
        if not self.bundle.write_gate(DEVICE, outcome.model_dump(mode="json")):
            notes = (*outcome.notes, UNWRITTEN)
            return outcome.model_copy(update={"notes": notes, "rows": 0})
        self.artifact.judge(placed)
        if rows:
            write_rows(rows, evidence_file(self.bundle))
        return outcome

    def is_own(self, job: str) -> bool:
        """Whether a job of the record measured this bundle."""
        return job.startswith(f"{self.label}/")

    def refused(self) -> tuple[str, ...]:
        """The compilers' refusals, of single functions and of the whole."""
        lines = [f"{n}: {line}" for n, f in self.recorded.functions.items() for line in f.refusals]
        return (*lines, *self.recorded.refusals)

    def residency(self) -> tuple[Audit, int]:
        """The audit with the machine's placements, and the number of ops that have one. Placements
        are kept if the record is."""
        predicted = audit(self.programs, target_of(self.machine.chip, self.machine.system))
        measured = self.placements()
        if self.unkept is not None:
            return predicted, 0
        if measured is None:
            self.notes.append("no compute plan was recorded, so residency stays as predicted")
            return predicted, 0
        placed = with_measured(predicted, measured, self.artifact.packages)
        self.artifact.keep(measured)
        return placed, sum(op.measured is not None for f in placed.functions for op in f.ops)

    def placements(self) -> Measured | None:
        """The record's compute plans; None if it has none."""
        plans: dict[str, dict[str, MeasuredFunction]] = {}
        for function in self.recorded.functions.values():
            if function.plan:
                plans.setdefault(function.shard, {})[function.function] = MeasuredFunction(
                    ops=function.plan
                )
        if not plans:
            return None
        machine = self.machine
        return Measured(
            machine=machine.chip,
            system=f"{machine.system} ({machine.build})",
            tools=f"coremltools {machine.coremltools}",
            compute_units=self.measurements.options.compute_units,
            date=self.measurements.date,
            packages={
                shard: MeasuredPackage(
                    specification=specification(self.bundle.shard(shard)), functions=functions
                )
                for shard, functions in plans.items()
            },
        )

    def speed(self) -> tuple[list[SpeedCompared], list[EvidenceRow]]:
        """The cost model beside the measurement, and rows of evidence. Both need a known chip and
        the checkpoint's shapes."""
        if self.unkept is not None:
            self.notes.append(self.unkept)
            return [], []
        if self.chip is None or not self.chip.stream:
            self.notes.append(f"the cost model does not know {self.machine.chip}: no evidence")
            return [], []
        try:
            planner = Planner(checkpoint_of(self.bundle, self.model), self.bundle.plan.recipe)
        except CetaneError as error:
            self.notes.append(f"no evidence for the cost model: {error.message}; give --model")
            return [], []
        predictor = Predictor(self.chip)
        source = f"a kit on {self.machine}, {self.measurements.date}"
        rows = evidence_rows(self.recorded, self.figures, planner, predictor, source)
        return list(compare(self.figures, planner, predictor)), list(rows)


def other_units(units: str) -> str | None:
    """Why measurements on these compute units are not kept; None if they are."""
    if units == KEPT_UNITS:
        return None
    return f"it ran on {units}, not on {KEPT_UNITS}, so this is not kept"
