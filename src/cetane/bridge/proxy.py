"""The proxy: the classes that coremltools calls in place of its binding to Core ML.

coremltools expects a RuntimeError if a model cannot be loaded or a prediction fails: its own
binding raises one for an NSError.
"""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cetane.bridge.compiled import compiled_copy, package_in_memory
from cetane.bridge.runner import RunState
from cetane.bridge.stage import PipelineStage
from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.program import MilFunction, Precision, listed
from cetane.mil.reader import load_pipeline

NEWEST_SPECIFICATION = 10  # iOS 26
_NEEDS_MAC = "needs Core ML and its devices, which only a Mac has; cetane.bridge runs models only"


@contextmanager
def _as_runtime_errors(what: str = "") -> Iterator[None]:
    try:
        yield
    except CetaneError as error:
        raise RuntimeError(f"{what}{error}") from error


class AssetProxy:
    """A compiled model that `MLModelAsset` holds: its folder. A temporary folder goes with it."""

    def __init__(self, path: Path, temporary: bool = False) -> None:
        self.path = path
        if temporary:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


class StateProxy:
    """The content of an `MLState`: the states of one model between predictions."""

    def __init__(self, function: MilFunction, state: RunState) -> None:
        self._function = function
        self.state = state

    def read_state(self, name: str) -> Array:
        """A copy of the state; float16 becomes float32. Raises RuntimeError for an unknown name."""
        self._check(name)
        return self.state.read(name)

    def write_state(self, name: str, value: Any) -> None:
        """Replace the state. Raises RuntimeError for another name or shape than the function's."""
        self._check(name)
        array, type_ = np.asarray(value), self._function.states[name]
        if array.ndim == 1 and array.size == 1 and not type_.shape:
            array = array.reshape(())
        if not type_.accepts(array.shape):
            raise RuntimeError(f"state {name}: expected {type_}, got shape {array.shape}")
        self.state.write(name, array)

    def _check(self, name: str) -> None:
        if name not in self._function.states:
            known = listed(self._function.states)
            raise RuntimeError(f"there is no state {name!r}: the function's states are {known}")


class ModelProxy:
    """A loaded ML program, or a pipeline of them. Compute units and hints have no effect here."""

    precision: Precision = "fp32"
    fast = True

    def __init__(
        self,
        path: str,
        compute_units: str,
        function_name: str = "",
        optimization_hints: Mapping[str, str] | None = None,
        asset: AssetProxy | None = None,
    ) -> None:
        start = time.perf_counter_ns()
        self._path = Path(path) if asset is None else asset.path
        self._asset = asset  # else its temporary folder is removed
        with _as_runtime_errors():
            if self._path.is_file():
                raise CetaneError(f"{path} is not a package: only ML programs run here")
            pipeline = load_pipeline(self._path)
            self._stages = [
                PipelineStage(program, function_name, self.precision, self.fast)
                for program in pipeline.programs
            ]
        self._outputs = pipeline.outputs
        self._load_time = time.perf_counter_ns() - start
        self._predict_time: int | None = None

    def predict(self, data: Mapping[str, Any], state: StateProxy | None = None) -> dict[str, Any]:
        """Predict outputs from inputs: arrays, numbers and images, by name. `state` is updated.

        Raises RuntimeError for inputs that do not fit."""
        start = time.perf_counter_ns()
        # Core ML's own words: some scripts match them.
        with _as_runtime_errors("Unable to compute the prediction using ML Program: "):
            values = dict(data)
            results: dict[str, Any] = {}
            for stage in self._stages:
                results = stage(values, None if state is None else state.state)
                values.update(results)
        self._predict_time = time.perf_counter_ns() - start
        if len(self._stages) > 1:
            return {name: values[name] for name in self._outputs}
        return results

    def batchPredict(self, data: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Predict from each item, one after the other."""
        return [self.predict(one) for one in data]

    def newState(self) -> StateProxy:
        """A new state, all zeros. Raises RuntimeError for a model without states, or a pipeline."""
        with _as_runtime_errors():
            stage = self._stages[0]
            if len(self._stages) > 1 or not stage.function.states:
                raise CetaneError(f"{self._path} has no state: only one program with states has")
            return StateProxy(stage.function, stage.runner.make_state())

    def get_compiled_model_path(self) -> str:
        """The path of a compiled copy, which lives as long as this object."""
        return str(self._compiled.path)

    @cached_property
    def _compiled(self) -> AssetProxy:
        return AssetProxy(compiled_copy(self._path), temporary=True)

    def get_load_duration_in_nano_seconds(self) -> int:
        """The time in ns that reading the package took."""
        return self._load_time

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        """The time in ns that the last prediction took; None before the first."""
        return self._predict_time

    @staticmethod
    def maximum_supported_specification_version() -> int:
        """The newest specification that can be read."""
        return NEWEST_SPECIFICATION

    @staticmethod
    def compileModel(path: str) -> str:
        """The path of a folder for `CompiledMLModel`. The caller must remove it."""
        with _as_runtime_errors():
            return str(compiled_copy(Path(path)))

    @staticmethod
    def create_model_asset_from_path(path: str) -> Any:
        """An `MLModelAsset` of a compiled folder."""
        from coremltools.models.model import MLModelAsset

        return MLModelAsset(AssetProxy(Path(path)))

    @staticmethod
    def create_model_asset_from_memory(spec_data: bytes, blob_mapping: dict[str, bytes]) -> Any:
        """An `MLModelAsset` of a serialized specification and its weight files."""
        from coremltools.models.model import MLModelAsset

        with _as_runtime_errors():
            folder = package_in_memory(spec_data, blob_mapping)
        return MLModelAsset(AssetProxy(folder, temporary=True))

    @staticmethod
    def auto_set_specification_version(spec: Any) -> NoReturn:
        """Not supported: only Core ML's library knows the rules. coremltools warns and goes on."""
        raise NotImplementedError(f"choosing the oldest specification version {_NEEDS_MAC}")

    @staticmethod
    def get_available_compute_devices() -> NoReturn:
        """Not supported: only Core ML knows the devices."""
        raise NotImplementedError(f"listing compute devices {_NEEDS_MAC}")

    @staticmethod
    def get_all_compute_devices() -> NoReturn:
        """Not supported: only Core ML knows the devices."""
        raise NotImplementedError(f"listing compute devices {_NEEDS_MAC}")

    @staticmethod
    def get_compute_plan(path: str, compute_units: str) -> NoReturn:
        """Not supported: only Core ML places ops on devices."""
        raise NotImplementedError(f"MLComputePlan {_NEEDS_MAC}")

    @staticmethod
    def get_model_structure(path: str) -> NoReturn:
        """Not supported: only Core ML's library gives the structure."""
        raise NotImplementedError(f"MLModelStructure {_NEEDS_MAC}")


def make_proxy(precision: Precision, fast: bool) -> type[ModelProxy]:
    """A proxy class with these options."""
    return type("_MLModelProxy", (ModelProxy,), {"precision": precision, "fast": fast})
