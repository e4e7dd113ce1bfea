"""What Xcode knows of a package: its performance reports, and the compiler's `analytics.mil`.

`NAME.mlperf` is a folder with `report.json`. `analytics.mil` lies in Core ML's cache: MIL text in
which every op has the chosen backend, estimated seconds by backend, and reasons for refusals. Apple
documents neither form. This module reads them as Anemll's `analyze_coreml_ops.py` (3a31f6b0) does.
Neither names the package, so `owner` finds it by the names of its ops' outputs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cetane.errors import CetaneError
from cetane.files import read_bytes, read_text
from cetane.gates.residency.measured import (
    Device,
    Measured,
    MeasuredFunction,
    MeasuredOp,
    MeasuredPackage,
    specification,
)
from cetane.kit.measurements import Text, one_line
from cetane.mil.program import Program
from cetane.validation import Data, parse_json, validated

LARGEST = 1 << 28
"""Bytes of the largest report that is read."""
REPORT = "report.json"
UNITS = {0: "CPU_ONLY", 1: "CPU_AND_GPU", 2: "ALL", 3: "CPU_AND_NE"}
"""Core ML's compute units by their numbers in a report."""
BACKENDS: dict[str, Device] = {
    "ane": "ANE", "bnns": "CPU", "classic_cpu": "CPU", "mps_graph": "GPU",
}  # fmt: skip
NO_MACHINE, NO_SYSTEM = "unknown machine", "unknown system"
"""The words for those that a file does not name."""
SAME = 0.8
"""The least share of a report's ops that a package must have to be the one reported."""


class Told(Data):
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


class Loose(BaseModel):
    """A part of an undocumented form: unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


# The parts of `report.json` that are read. The keys are Xcode's.


class XcodeDevice(Loose):
    modelName: Text = ""
    displayName: Text = ""
    osNameAndVersionWithoutBuildNumber: Text = ""


class XcodeSamples(Loose):
    samples: Annotated[tuple[Seconds, ...], Field(max_length=1_000_000)] = ()

    @property
    def ms(self) -> float | None:
        return 1e3 * median(self.samples) if self.samples else None


class XcodeCost(Loose):
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class XcodePreferred(Loose):
    deviceType: dict[str, Any] | Text = ""


class XcodeUsage(Loose):
    preferred: XcodePreferred = XcodePreferred()


class XcodeOutput(Loose):
    name: Text = ""


class XcodeOperation(Loose):
    operatorName: Text = ""
    cost: XcodeCost | None = None
    deviceUsage: XcodeUsage | None = None
    outputs: tuple[XcodeOutput, ...] = ()


class XcodeBlock(Loose):
    operations: Annotated[tuple[XcodeOperation, ...], Field(max_length=1_000_000)] = ()


class XcodeFunction(Loose):
    block: XcodeBlock = XcodeBlock()


class XcodeFunctions(Loose):
    functions: dict[Text, XcodeFunction] = Field(default_factory=dict)


class XcodeStructure(Loose):
    program: dict[str, XcodeFunctions] = Field(default_factory=dict)


class XcodeResults(Loose):
    predict: XcodeSamples = XcodeSamples()
    load: XcodeSamples = XcodeSamples()
    compile: XcodeSamples = XcodeSamples()
    modelStructure: XcodeStructure = XcodeStructure()


class XcodeReport(Loose):
    deviceInfo: XcodeDevice = XcodeDevice()
    computeUnit: int | None = None
    deviceResults: XcodeResults


def read_report(folder: Path) -> Told:
    """An `.mlperf` folder. Raises CetaneError for another one."""
    path = folder / REPORT
    hint = "Xcode writes one: open a package, Performance, +"
    if not path.is_file():
        raise CetaneError(f"{folder}: no {REPORT}, so not an .mlperf folder", hint)
    content = parse_json(read_bytes(path, LARGEST, follow=False), str(path), hint, unique=True)
    report = validated(XcodeReport, content, f"{path}: not a performance report", hint)
    info, results = report.deviceInfo, report.deviceResults
    program = results.modelStructure.program.get("_0", XcodeFunctions())
    return Told(
        machine=info.modelName or info.displayName or NO_MACHINE,
        system=info.osNameAndVersionWithoutBuildNumber or NO_SYSTEM,
        compute_units=UNITS.get(-1 if report.computeUnit is None else report.computeUnit, "ALL"),
        functions={
            name: tuple(reported(op) for op in function.block.operations)
            for name, function in program.functions.items()
        },
        predict_ms=results.predict.ms,
        load_ms=results.load.ms,
        compile_ms=results.compile.ms,
    )


def reported(op: XcodeOperation) -> MeasuredOp:
    """An operation of a report. Its device is a word, or an object with one key."""
    said = op.deviceUsage.preferred.deviceType if op.deviceUsage else ""
    text = said if isinstance(said, str) else " ".join(said)
    device: Device | None = None
    for word, named in (("neuralEngine", "ANE"), ("cpu", "CPU"), ("gpu", "GPU")):
        if word.lower() in text.lower():
            device = named  # type: ignore[assignment]
            break
    return MeasuredOp(
        output=op.outputs[0].name if op.outputs else "",
        kind=op.operatorName.rpartition(".")[2][:100],
        device=device,
        cost=op.cost.weight if op.cost else None,
    )


FUNCTION = re.compile(r"^\s*func\s+([\w.@-]{1,255})\s*<")
NAME = re.compile(r">\s+([\w.@/-]{1,1000})")
KIND = re.compile(r"\w{1,100}")
BACKEND = re.compile(r'SelectedBackend = string\("(\w{1,40})"\)')
RUNTIME = re.compile(r'"(\w{1,40})", ([0-9a-fA-FxXpP.+-]{1,40})')
MESSAGE = re.compile(r'"(\w{1,40})", "((?:[^"\\]|\\.){1,1000})"')
LONGEST_LINE = 1 << 20
"""Characters of the longest line that is searched."""


def read_analytics(path: Path) -> Told:
    """An `analytics.mil`. Raises CetaneError for a file without a chosen backend."""
    functions: dict[str, list[MeasuredOp]] = {}
    estimated: dict[str, float] = defaultdict(float)
    reasons: Counter[str] = Counter()
    name = "main"
    for line in read_text(path).splitlines():
        if len(line) > LONGEST_LINE:
            raise CetaneError(f"{path}: a line of {len(line):,} characters, which no op has")
        if begun := FUNCTION.match(line):
            name = begun[1]
            continue
        op = op_of(line)
        if op is None:
            continue
        functions.setdefault(name, []).append(op)
        if op.cost is not None:
            estimated[name] += 1e3 * op.cost
        if (reason := messages(line).get("ane")) is not None:
            reasons[f"{op.kind}: {reason}"] += 1
    if not functions:
        raise CetaneError(
            f"{path}: no op with a SelectedBackend, so not Core ML's analytics.mil",
            "it lies in com.apple.e5rt.e5bundlecache, under ~/Library/Caches",
        )
    return Told(
        machine=NO_MACHINE,
        system=NO_SYSTEM,
        compute_units="CPU_AND_NE",
        functions={name: tuple(ops) for name, ops in functions.items()},
        estimated_ms=dict(estimated),
        refusals=dict(reasons.most_common(20)),
    )


def op_of(line: str) -> MeasuredOp | None:
    """The op of a line, with the estimated seconds at its chosen backend; None for a line without
    an op that has one."""
    backend = BACKEND.search(line)
    results, _, kind = line.partition("(")[0].strip().rpartition(" = ")
    if backend is None or not KIND.fullmatch(kind):
        return None
    first, chosen = NAME.search(results), backend[1]
    return MeasuredOp(
        output=first[1] if first else "",
        kind=kind,
        device=BACKENDS.get(chosen),
        cost=runtimes(line).get(chosen),
    )


def entries(line: str, remark: str) -> str:
    """The entries of a dictionary among an op's remarks, as text; empty if it has none.

    A hostile line may begin one again and again, and a regular expression would seek the end of
    each.
    """
    found, end, _ = line.partition(f"{remark}({{{{")[2].partition("}})")
    return found if end else ""


def runtimes(line: str) -> dict[str, float]:
    """Estimated seconds by backend, in decimal or in hexadecimal form."""
    made = {}
    for backend, text in RUNTIME.findall(entries(line, "EstimatedRuntime = dict<string, fp64>")):
        try:
            value = float.fromhex(text) if "x" in text.lower() else float(text)
        except (ValueError, OverflowError):
            continue
        if 0 <= value < 86_400:
            made[backend] = value
    return made


def messages(line: str) -> dict[str, str]:
    """Reasons against a backend, by backend."""
    found = MESSAGE.findall(entries(line, "ValidationMessage = dict<string, string>"))
    return {backend: one_line(text.replace('\\"', '"')) for backend, text in found}


def as_measured(
    told: Told, programs: Mapping[str, Program], packages: Mapping[str, Path], date: str
) -> Measured:
    """What a file told, as measurements of the package that it is about.

    Raises CetaneError if no package has its ops, or if several have them.
    """
    name = owner(told, programs, packages)
    functions = {f: MeasuredFunction(ops=ops) for f, ops in told.functions.items()}
    known = {f: made for f, made in functions.items() if f in programs[name].functions}
    if not known and len(functions) == len(programs[name].functions) == 1:
        known = dict(zip(programs[name].functions, functions.values(), strict=True))
    if not known:
        raise CetaneError(f"{name} has none of the functions {', '.join(functions)}")
    return Measured(
        machine=told.machine,
        system=told.system,
        tools="Xcode",
        compute_units=told.compute_units,
        date=date,
        packages={
            name: MeasuredPackage(specification=specification(packages[name]), functions=known)
        },
    )


def owner(told: Told, programs: Mapping[str, Program], packages: Mapping[str, Path]) -> str:
    """The package whose ops these are, by the names of their outputs. Raises CetaneError if none
    has them, or if several do."""
    named = {op.output for ops in told.functions.values() for op in ops if op.output}
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
