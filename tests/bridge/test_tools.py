"""What coremltools builds on predictions: calibration, inspection, comparison, bisection."""

import asyncio
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
import torch
from coremltools.models.ml_program.experimental.debugging_utils import (
    MLModelComparator,
    MLModelInspector,
)
from coremltools.optimize.coreml.experimental import (
    OpActivationLinearQuantizerConfig,
    linear_quantize_activations,
)

from cetane.mil import load

from .conftest import convert

pytestmark = pytest.mark.usefixtures("bridged")


@pytest.fixture
def model() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3), torch.nn.Tanh()
    )
    return layers, convert(layers, torch.zeros(1, 3, 8, 8))


def test_activations_are_calibrated_and_quantized(
    model: tuple[torch.nn.Module, Any], tmp_path: Path
) -> None:
    layers, _ = model
    # coremltools quantizes activations of float16 models only.
    original = convert(layers, torch.zeros(1, 3, 8, 8), compute_precision=ct.precision.FLOAT16)
    inputs = torch.randn(4, 1, 3, 8, 8)
    config = OpActivationLinearQuantizerConfig(mode="linear_symmetric")
    quantized = linear_quantize_activations(
        original,
        cto.OptimizationConfig(global_config=config),
        [{"x": x.numpy()} for x in inputs],
    )
    weights = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
    both = cto.linear_quantize_weights(quantized, cto.OptimizationConfig(global_config=weights))
    path = tmp_path / "w8a8.mlpackage"
    both.save(str(path))
    kinds = {op.kind for op in load(path).functions["main"].ops}
    assert {"quantize", "dequantize"} <= kinds
    y = both.predict({"x": inputs[0].numpy()})["y"]
    # coremltools keeps the range of the last sample only, so a few values are clipped.
    assert np.abs(y - layers(inputs[0]).detach().numpy()).mean() < 0.02


def test_inspector_gives_every_intermediate(model: tuple[torch.nn.Module, Any]) -> None:
    layers, original = model
    x = torch.randn(1, 3, 8, 8)

    async def inspect() -> dict[str, Any]:
        inspector = MLModelInspector(original, compute_units=ct.ComputeUnit.CPU_ONLY)
        found = inspector.inspect({"x": x.numpy()})
        return {name: value async for name, value in found if value is not None}

    values = asyncio.run(inspect())
    kinds = [op.kind for op in load(original.package_path).functions["main"].ops]
    assert len(values) == sum(kind != "const" for kind in kinds)
    np.testing.assert_allclose(values["y"], layers(x).detach(), rtol=1e-4, atol=1e-5)
    assert any(np.allclose(v, layers[0](x).detach(), atol=1e-5) for v in values.values()
               if v.shape == (1, 8, 6, 6))  # fmt: skip


def test_comparator_agrees_with_itself(model: tuple[torch.nn.Module, Any]) -> None:
    _, original = model

    async def compare() -> Any:
        comparator = MLModelComparator(original, original)
        inputs = {"x": np.zeros((1, 3, 8, 8), np.float32)}
        return await comparator.find_failing_ops(inputs, lambda op, a, b: np.array_equal(a, b))

    assert asyncio.run(compare()) == []


def test_halves_of_a_model_run_in_turn(
    model: tuple[torch.nn.Module, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layers, original = model
    original.save(str(tmp_path / "whole.mlpackage"))
    ct.models.utils.bisect_model(
        str(tmp_path / "whole.mlpackage"), str(tmp_path), merge_chunks_to_pipeline=True
    )
    (path,) = tmp_path.glob("*pipeline*.mlpackage")
    x = torch.randn(1, 3, 8, 8)
    (y,) = ct.models.MLModel(str(path)).predict({"x": x.numpy()}).values()
    np.testing.assert_allclose(y, layers(x).detach(), rtol=1e-2, atol=1e-2)
