"""What Xcode or Core ML's cache told of a package's functions, as measurements of that package.

No such file names its package, so `owner` finds it by the names of its ops' outputs.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from cetane.errors import CetaneError
from cetane.gates.residency.measured import (
    Measured,
    MeasuredFunction,
    MeasuredOp,
    MeasuredPackage,
    specification,
)
from cetane.mil.program import Program
from cetane.validation import Data

NO_MACHINE, NO_SYSTEM = "unknown machine", "unknown system"
"""The words for those that a file does not name."""
SAME = 0.8
"""The least share of a report's ops that a package must have to be the one reported."""


class PackageReport(Data):
    """What one file says of one package's functions."""

    machine: str
    system: str
    compute_units: str
    functions: dict[str, tuple[MeasuredOp, ...]]
    predict_ms: float | None = None
    load_ms: float | None = None
    compile_ms: float | None = None
    estimated_ms: dict[str, float] = Field(default_factory=dict)
    """The compiler's own estimate of a function's time, at the backends that it chose."""
    refusals: dict[str, int] = Field(default_factory=dict)
    """Its reasons against the Neural Engine, as "KIND: REASON", with the number of ops."""


def as_measured(
    report: PackageReport, programs: Mapping[str, Program], packages: Mapping[str, Path], date: str
) -> Measured:
    """What a file told, as measurements of the package that it is about.

    Raises CetaneError if no package has its ops, or if several have them.
    """
    name = owner(report, programs, packages)
    functions = {f: MeasuredFunction(ops=ops) for f, ops in report.functions.items()}
    known = {f: made for f, made in functions.items() if f in programs[name].functions}
    if not known and len(functions) == len(programs[name].functions) == 1:
        known = dict(zip(programs[name].functions, functions.values(), strict=True))
    if not known:
        raise CetaneError(f"{name} has none of the functions {', '.join(functions)}")
    return Measured(
        machine=report.machine,
        system=report.system,
        tools="Xcode",
        compute_units=report.compute_units,
        date=date,
        packages={
            name: MeasuredPackage(specification=specification(packages[name]), functions=known)
        },
    )


def owner(
    report: PackageReport, programs: Mapping[str, Program], packages: Mapping[str, Path]
) -> str:
    """The package whose ops these are, by the names of their outputs. Raises CetaneError if none
    has them, or if several do."""
    named = {op.output for ops in report.functions.values() for op in ops if op.output}
    shares = {
        name: len(named & outputs(program)) / max(len(named), 1)
        for name, program in programs.items()
    }
    best = max(shares.values(), default=0.0)
    if best < SAME:
        raise CetaneError(
            f"its {len(named)} ops are not those of any package here: at most {best:.0%} agree",
            "name the package that was profiled",
        )
    nearest = [name for name, share in shares.items() if share == best]
    if len(nearest) > 1:
        raise CetaneError(
            f"its ops are those of {', '.join(nearest[:4])} alike",
            f"give the package that was profiled, such as {packages[nearest[0]]}, not its bundle",
        )
    return nearest[0]


def outputs(program: Program) -> set[str]:
    """The names of all results of a program."""
    return {v.name for f in program.functions.values() for op in f.ops for v in op.outputs}
