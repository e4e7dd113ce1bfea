"""Core ML's own placements: the MLComputePlan of every function, made on a Mac, read anywhere.

`cetane.measuring.compute_plan` asks for one function's plan.
"""

from __future__ import annotations

import platform
import tempfile
from collections import defaultdict, deque
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from cetane.errors import CetaneError
from cetane.files import read_bytes, sha256
from cetane.gates.residency.audit import Audit, FunctionAudit, Placed, audit, judged
from cetane.gates.residency.rule import Placement
from cetane.gates.residency.target import DEFAULT_OS, Target, system_number, target_of
from cetane.hardware.chips import DEFAULT_CHIP, chip_named
from cetane.measuring.compute_plan import plan
from cetane.measuring.machine import FACTS, is_mac, sysctl
from cetane.mil.package import Package
from cetane.mil.program import Program
from cetane.validation import Data, parse_json, validated

Device = Literal["ANE", "CPU", "GPU"]
NO_MEASUREMENTS = "not measurements of a Mac"
HINT = "cetane audit PACKAGE --measure, on a Mac, writes them"
LARGEST = 1 << 28
"""The largest file of measurements that is read, in bytes."""


class MeasuredOp(Data):
    """One op of a plan."""

    output: Annotated[str, StringConstraints(max_length=1000)]
    kind: Annotated[str, StringConstraints(max_length=100)]
    device: Device | None
    """The preferred device; None if there is none, as for constants."""
    cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Its share of the function's time, as Core ML estimates it."""


class MeasuredFunction(Data):
    """A function's plan, or the error in its place."""

    ops: tuple[MeasuredOp, ...] = ()
    error: str | None = None


class MeasuredPackage(Data):
    """The plans of a package; `specification` is the sha256 of its model file."""

    specification: str
    functions: dict[str, MeasuredFunction]


class Measured(Data):
    """The measurements of packages on one machine."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    machine: str
    system: str
    tools: str
    compute_units: str = "CPU_AND_NE"
    date: str
    packages: dict[str, MeasuredPackage]

    def __str__(self) -> str:
        return f"{self.where}, {self.date}"

    @property
    def where(self) -> str:
        """The machine and its system."""
        return f"{self.machine}, {self.system}"

    @property
    def target(self) -> Target:
        """The target whose rules hold for the machine."""
        return target_of(self.machine, self.system)

    def speaks_of(self, chip: str | None, os: float | None) -> bool:
        """Whether it was measured on this chip and this system; None is any."""
        own = chip_named(self.machine)
        of_chip = chip is None or (own is not None and own.id == chip)
        return of_chip and (os is None or int(os) == system_number(self.system))


def read_measured(path: Path) -> Measured:
    """A file of `cetane audit --measure`: that of a package, or a bundle's
    `gates/residency-measured.json`. Raises CetaneError for another file."""
    content = parse_json(read_bytes(path, LARGEST), str(path), HINT)
    if isinstance(content, dict) and "bundle" in content:
        content = content.get("measured")
    return parse_measured(content, str(path))


def parse_measured(content: Any, where: str) -> Measured:
    """Measurements from JSON. Raises CetaneError if it holds none."""
    return validated(Measured, content, f"{where}: {NO_MEASUREMENTS}", HINT)


def audit_for(
    chip: str | None,
    os: float | None,
    programs: dict[str, Program],
    packages: dict[str, Path],
    measured: Measured | None,
) -> tuple[Audit, str | None]:
    """The audit for a chip and a system, by default those of the measurements, else those of
    `Target`.

    Measurements on another chip or system are left out, and the second result says so. Raises
    CetaneError if they are of other packages.
    """
    if measured is not None and measured.speaks_of(chip, os):
        return with_measured(audit(programs, measured.target), measured, packages), None
    target = Target(DEFAULT_CHIP if chip is None else chip, os or DEFAULT_OS)
    predicted = audit(programs, target)
    if measured is None:
        return predicted, None
    of_these(measured, packages)
    return predicted, f"what was measured on {measured.where} says nothing of {target}"


def with_measured(predicted: Audit, measured: Measured, packages: dict[str, Path]) -> Audit:
    """The audit with measurements, which win. Its target is the measured machine, in its own words.
    Raises CetaneError if they are of other packages."""
    known = of_these(measured, packages)
    functions = tuple(
        merged(function, known[function.package].functions.get(function.function))
        if function.package in known and not function.variant else function
        for function in predicted.functions
    )  # fmt: skip
    known_chip = chip_named(measured.machine) is not None
    rules = "" if known_chip else f" (rules of {predicted.target.chip})"
    target = replace(predicted.target, machine=measured.where + rules)
    return judged(target, functions, predicted.findings)


def of_these(measured: Measured, packages: dict[str, Path]) -> dict[str, MeasuredPackage]:
    """The measurements of these packages. Raises CetaneError if they are of others."""
    known = {n: p for n, p in measured.packages.items() if n in packages}
    if not known:
        raise CetaneError(
            f"the measurements are of the packages {', '.join(measured.packages)}, not of "
            f"{', '.join(packages)}",
            HINT,
        )
    for name, plans in known.items():
        if plans.specification != specification(packages[name]):
            raise CetaneError(
                f"the measurements are of another build of {name}", "measure this one"
            )
    return known


def merged(function: FunctionAudit, made: MeasuredFunction | None) -> FunctionAudit:
    """A function's audit with the places of a Mac's plan; all ops fail if Core ML refused it."""
    if made is None:
        return function
    by_output = {op.output: op for op in made.ops if op.output}
    nameless: defaultdict[str, deque[MeasuredOp]] = defaultdict(deque)
    # Writes of states have no result: their order tells them apart.
    for said in made.ops:
        if not said.output:
            nameless[said.kind].append(said)

    def place(op: Placed) -> Placed:
        if made.error is not None:
            return replace(op, measured="fails")
        queue = nameless[op.kind]
        said = by_output.get(op.output) if op.output else queue.popleft() if queue else None
        if said is None:
            return op
        return replace(op, measured=placement(said.device), cost=said.cost)

    return replace(function, ops=tuple(place(op) for op in function.ops), refusal=made.error)


def with_kept(measured: Measured, kept: Measured | None) -> Measured:
    """New measurements, and the kept ones of other functions, if they are of the same machine and
    system. Both are of the same builds."""
    if kept is None or (kept.machine, kept.system) != (measured.machine, measured.system):
        return measured
    packages = dict(kept.packages)
    for name, package in measured.packages.items():
        before = packages[name].functions if name in packages else {}
        packages[name] = package.model_copy(update={"functions": {**before, **package.functions}})
    return measured.model_copy(update={"packages": packages})


def placement(device: Device | None) -> Placement | None:
    return None if device is None else "ANE" if device == "ANE" else "CPU"


def specification(package: Path) -> str:
    """The identity of a package's programs: sha256 of its model file."""
    return sha256(Package(package).spec_path)


def measure(packages: dict[str, Path]) -> Measured:
    """Measure the plan of every function of these packages. Core ML compiles them: large packages
    take minutes.

    Raises CetaneError anywhere but on a Mac.
    """
    if not is_mac():
        raise CetaneError(
            "only a Mac can measure where ops run",
            "run the same command there, then pass the file it writes: --measured FILE",
        )
    build = sysctl(FACTS["build"])
    return Measured(
        machine=sysctl(FACTS["chip"]),
        system=f"macOS {platform.mac_ver()[0]} ({build})",
        tools=f"coremltools {version('coremltools')}",
        date=datetime.now(UTC).date().isoformat(),
        packages={name: measure_package(path) for name, path in packages.items()},
    )


def measure_package(path: Path) -> MeasuredPackage:
    """The plans of all functions of a package."""
    plans = {}
    for name in sorted(Package(path).spec.mlProgram.functions):
        with tempfile.TemporaryDirectory(prefix="cetane-plan-") as folder:
            try:
                ops = tuple(MeasuredOp(**op) for op in plan(path, name, Path(folder)))
                plans[name] = MeasuredFunction(ops=ops)
            except (RuntimeError, ValueError) as error:  # what the compiler refuses
                plans[name] = MeasuredFunction(error=" ".join(str(error).split()))
    return MeasuredPackage(specification=specification(path), functions=plans)
