"""A backend on Core ML itself, on macOS, through coremltools' public API."""

import shutil
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from cetane.engine.backend import Arrays
from cetane.errors import CetaneError
from cetane.files import cache_dir, remove, replacing
from cetane.hardware.mac import os_build
from cetane.hardware.quiet import import_coremltools
from cetane.schema.function import Function

ComputeUnits = Literal["CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU"]
UNITS: tuple[ComputeUnits, ...] = get_args(ComputeUnits)
"""Core ML's compute units. The first is the default."""


class Compilable(Protocol):
    """The parts of a bundle, or of a draft head, that this backend reads."""

    @property
    def digest(self) -> str: ...
    def shard(self, name: str) -> Path:
        """The package of a shard."""

    def functions(self, name: str) -> tuple[Function, ...]:
        """The functions of a shard."""


class CoreMLProgram:
    """A compiled shard. Each function is a model of its own; all share the shard's state."""

    def __init__(
        self, path: Path, functions: list[str], stateful: bool, units: ComputeUnits
    ) -> None:
        ct = import_coremltools()
        self.stateful = stateful
        self.models = {
            name: ct.models.CompiledMLModel(
                str(path),
                compute_units=getattr(ct.ComputeUnit, units),
                function_name=name if len(functions) > 1 else None,
            )
            for name in functions
        }

    def make_state(self, function: str) -> Any:
        return self.models[function].make_state() if self.stateful else None

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        outputs: Arrays = self.models[function].predict(inputs, state)
        return outputs


class CoreMLBackend:
    """Compiles each shard once. The cache folder keeps the result under the digest of its source
    and the system's build.

    Raises CetaneError on a system without macOS 15.
    """

    name, by_rows = "coreml", False
    dtype: type[np.floating[Any]] = np.float16

    def __init__(self, shards: Compilable, units: ComputeUnits = UNITS[0]) -> None:
        ct = import_coremltools()
        if ct.utils._macos_version() < (15, 0):
            raise CetaneError(
                "the coreml backend needs macOS 15 or later",
                "elsewhere, cetane run --backend portable runs the bundle",
            )
        self.shards, self.units = shards, units

    def open(self, shard: str) -> CoreMLProgram:
        functions = self.shards.functions(shard)
        stateful = any(function.states for function in functions)
        names = [function.name for function in functions]
        return CoreMLProgram(self.compiled(shard), names, stateful, self.units)

    def compiled(self, shard: str) -> Path:
        """The `.mlmodelc` of a shard."""
        ct = import_coremltools()
        package = self.shards.shard(shard)
        target = self._target(shard)
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary:
                shutil.move(ct.models.utils.compile_model(str(package)), temporary)
        return target

    def forget(self, shard: str) -> None:
        """Remove a compiled shard, so that it is compiled again."""
        remove(self._target(shard))

    def _target(self, shard: str) -> Path:
        """The path of a compiled shard. It names the system's build, since other builds cannot
        load the shard."""
        name = f"{self.shards.digest[:16]}-{shard}-{os_build()}.mlmodelc"
        return cache_dir() / "compiled" / name
