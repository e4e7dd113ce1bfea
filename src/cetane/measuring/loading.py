"""Packages compiled and functions loaded by Core ML."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from . import Json


def compile_package(package: Path, target: Path) -> None:
    """Compile a package. The folder appears only when it is complete."""
    from coremltools.models.utils import compile_model

    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    made = Path(compile_model(str(package), str(temporary.with_suffix(".mlmodelc"))))
    made.rename(target)


def load(job: Json) -> Any:
    """A compiled function."""
    import coremltools as ct

    return ct.models.CompiledMLModel(
        job["compiled"],
        compute_units=getattr(ct.ComputeUnit, job["units"]),
        function_name=job["function"] if job["several"] else None,
    )
