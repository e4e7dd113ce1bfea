"""A stage: one ML program for coremltools' binding, with features in and features out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from cetane.bridge.runner import Runner, RunState, prepare
from cetane.errors import CetaneError
from cetane.mil.bind import require_ops
from cetane.mil.dtypes import Array
from cetane.mil.features import as_array, default_array, from_array
from cetane.mil.program import Features, Precision, Program, SizeRange, TensorType, listed


class PipelineStage:
    """A function of a program: a model, or one of a pipeline.

    Loading leaves the weights encoded, and the first prediction decodes them: most models that
    coremltools converts never predict. Raises CetaneError if there is no such function, or if it
    uses an op that no executor has.
    """

    def __init__(self, program: Program, name: str, precision: Precision, fast: bool) -> None:
        name = name or program.default
        if name not in program.functions:
            raise CetaneError(
                f"{program.path} has no function {name!r}",
                hint=f"its functions are {listed(program.functions)}",
            )
        self.function = program.functions[name]
        require_ops(self.function)
        self._interface = self.function.interface or Features()
        self._prepare = lambda: prepare(program, self.function, precision, fast)

    @cached_property
    def runner(self) -> Runner:
        """The compiled function."""
        return self._prepare()

    def __call__(self, data: Mapping[str, Any], state: RunState | None) -> dict[str, Any]:
        """Predict from the function's inputs in `data`; other values are ignored.

        Raises CetaneError for inputs that are missing or do not fit."""
        results = self.runner(self._inputs(data), state)
        features = self._interface.outputs
        return {name: from_array(features[name], results[name]) for name in features}

    def _inputs(self, data: Mapping[str, Any]) -> dict[str, Array]:
        inputs = {}
        for name, type_ in self.function.inputs.items():
            feature = self._interface.inputs[name]
            if name in data:
                inputs[name] = as_array(name, feature, type_, data[name])
                _check_flexible(name, type_, inputs[name].shape)
            elif feature.optional:
                inputs[name] = default_array(feature, type_)
        self.function.check_inputs(inputs)
        return inputs


def _check_flexible(name: str, type_: TensorType, shape: tuple[int, ...]) -> None:
    """Raise CetaneError, in Core ML's words, if a flexible input has a shape that is not
    allowed."""
    if type_.enumerated and shape not in type_.enumerated:
        sizes = " x ".join(map(str, shape))
        raise CetaneError(
            f"input {name}: MultiArray Shape ({sizes}) was not in enumerated set of allowed "
            f"shapes, {type_}"
        )
    if type_.any_shape or type_.enumerated or len(shape) != len(type_.shape):
        return
    for axis, (size, allowed) in enumerate(zip(shape, type_.shape, strict=True)):
        if isinstance(allowed, SizeRange) and size not in allowed:
            raise CetaneError(
                f"input {name}: Size ({size}) of dimension ({axis}) is not in allowed range "
                f"({allowed})"
            )
