"""Xcode's performance reports: `NAME.mlperf`, a folder with `report.json`.

Apple does not document this form. It is read here as Anemll's `analyze_coreml_ops.py` (3a31f6b0)
does.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.gates.residency.measured import Device, MeasuredOp
from cetane.kit.measurements import Text
from cetane.kit.package_report import NO_MACHINE, NO_SYSTEM, PackageReport
from cetane.validation import parse_json, validated

LARGEST = 1 << 28
"""Bytes of the largest report that is read."""
REPORT = "report.json"
UNITS = {0: "CPU_ONLY", 1: "CPU_AND_GPU", 2: "ALL", 3: "CPU_AND_NE"}
"""Core ML's compute units by their numbers in a report."""
DEVICES: dict[str, Device] = {"neuralengine": "ANE", "cpu": "CPU", "gpu": "GPU"}
"""The devices by words of a report, in small letters."""


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


def read_report(folder: Path) -> PackageReport:
    """An `.mlperf` folder. Raises CetaneError for another one."""
    path = folder / REPORT
    hint = "Xcode writes one: open a package, Performance, +"
    if not path.is_file():
        raise CetaneError(f"{folder}: no {REPORT}, so not an .mlperf folder", hint)
    content = parse_json(read_bytes(path, LARGEST, follow=False), str(path), hint, unique=True)
    report = validated(XcodeReport, content, f"{path}: not a performance report", hint)
    info, results = report.deviceInfo, report.deviceResults
    program = results.modelStructure.program.get("_0", XcodeFunctions())
    return PackageReport(
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
    text = (said if isinstance(said, str) else " ".join(said)).lower()
    return MeasuredOp(
        output=op.outputs[0].name if op.outputs else "",
        kind=op.operatorName.rpartition(".")[2][:100],
        device=next((device for word, device in DEVICES.items() if word in text), None),
        cost=op.cost.weight if op.cost else None,
    )
