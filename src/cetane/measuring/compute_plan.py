"""Core ML's plan of a function: the device on which it would run every op.

Core ML only plans a package's default function. So each other function becomes the default of a
copy that shares the weight file. Reading the plan compiles the program for every device.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import Json

DEVICES = {"NeuralEngine": "ANE", "CPU": "CPU", "GPU": "GPU"}


def plan(package: Path, function: str, folder: Path, units: str = "CPU_AND_NE") -> list[Json]:
    """The ops of a function in order: `output`, `kind`, `device`, `cost`.

    `folder` is for temporary files. Raises what Core ML raises for a program that it refuses.
    """
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan
    from coremltools.models.utils import compile_model

    source = with_default(package, function, folder)
    compiled = compile_model(str(source), str(folder / "plan.mlmodelc"))
    loaded = MLComputePlan.load_from_path(compiled, compute_units=getattr(ct.ComputeUnit, units))
    program = loaded.model_structure.program
    return list(planned(loaded, program.functions[function].block))


def model_file(package: Path) -> Path:
    """The specification inside a package, by its manifest."""
    content = json.loads((package / "Manifest.json").read_text(encoding="utf-8"))
    path: str = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
    return package / "Data" / path


def with_default(package: Path, function: str, folder: Path) -> Path:
    """The package if it has only this function, else a copy in which it is the default."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(model_file(package).read_bytes())
    if len(spec.mlProgram.functions) < 2:
        return package
    spec.description.defaultFunctionName = function
    copy = folder / package.name
    for file in (path for path in package.rglob("*") if path.is_file()):
        target = copy / file.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file == model_file(package):
            target.write_bytes(spec.SerializeToString())
        else:
            link(file, target)
    return copy


def link(file: Path, target: Path) -> None:
    """Link a file under another name; copy it if the disk is another one."""
    try:
        target.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, target)


def planned(loaded: Any, block: Any) -> Iterator[Json]:
    """The ops of a block, and of the blocks inside them."""
    for op in block.operations:
        usage = loaded.get_compute_device_usage_for_mlprogram_operation(op)
        cost = loaded.get_estimated_cost_for_mlprogram_operation(op)
        yield {
            "output": op.outputs[0].name if op.outputs else "",
            "kind": op.operator_name.rpartition(".")[2],  # "ios18.conv"
            "device": None if usage is None else device(usage.preferred_compute_device),
            "cost": None if cost is None else cost.weight,
        }
        for inner in op.blocks:
            yield from planned(loaded, inner)


def device(unit: Any) -> str | None:
    """The short name of coremltools' MLNeuralEngineComputeDevice and its like."""
    return DEVICES.get(type(unit).__name__.removeprefix("ML").removesuffix("ComputeDevice"))
