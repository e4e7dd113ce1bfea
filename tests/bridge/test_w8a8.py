"""A language model's shard, calibrated, quantized and executed by coremltools without a Mac."""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.optimize.coreml.experimental import linear_quantize_activations

from cetane.bundle import Bundle
from cetane.engine.backend import Arrays
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.lower.package import single_function
from cetane.mil import load

TEXT = np.random.default_rng(7).integers(1, 288, 40).tolist()
CALIBRATED = 8
"""Of the steps, how many calibrate; the others are held out."""


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(verify=None, layout={"kind": "chunks", "chunks": 1})


@pytest.fixture(scope="module")
def steps(bundle: Bundle) -> list[Arrays]:
    """What the layers are given at every fourth token of a text, caches and all."""
    backend = PortableBackend(bundle)
    engine = Engine(bundle.plan, backend, bundle.tables())
    layers = next(shard.name for shard in bundle.plan.shards if shard.kind == "layers")
    program, calls = engine.open(layers), []
    session = engine.session(["decode"])
    with pytest.MonkeyPatch.context() as patch:
        call = program.call

        def recorded(function: str, inputs: Arrays, state: Any) -> Arrays:
            calls.append({name: value.copy() for name, value in inputs.items()})
            return call(function, inputs, state)

        patch.setattr(program, "call", recorded)
        session.feed(TEXT)
    return calls[::3]


@pytest.mark.usefixtures("bridged")
def test_a_shard_in_w8a8(
    bundle: Bundle, steps: list[Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where coremltools leaves packages
    shard = next(shard.name for shard in bundle.plan.shards if shard.kind == "layers")
    model = single_function(bundle.shard(shard), "decode")
    symmetric = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
    # The additions would be quantized too, a mask of -4e4 among them.
    activations = cto.OptimizationConfig(global_config=symmetric, op_type_configs={"add": None})
    calibration, held_out = steps[-CALIBRATED:], steps[:-CALIBRATED]
    quantized = cto.linear_quantize_weights(
        linear_quantize_activations(model, activations, calibration),
        cto.OptimizationConfig(global_config=symmetric),
    )
    path = tmp_path / "w8a8.mlpackage"
    quantized.save(str(path))
    kinds = Counter(op.kind for op in load(path).functions["main"].ops)
    assert kinds["quantize"] >= kinds["conv"] >= 14
    assert kinds["dequantize"] >= kinds["conv"]
    assert kinds["constexpr_blockwise_shift_scale"] >= kinds["conv"]
    *_, last = calibration
    errors = [relative_errors(model.predict(s), quantized.predict(s)) for s in [*held_out, last]]
    # coremltools 9 keeps the ranges of the last sample only: the others are clipped.
    assert 0 < max(errors[-1].values()) < 0.1
    assert max(max(error.values()) for error in errors) < 1


def relative_errors(truth: Arrays, found: Arrays) -> dict[str, float]:
    """By output, the length of the error as a share of the truth's."""
    return {
        name: float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in truth.items()
    }


def test_a_function_that_is_not_there(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="has no function 'verify'"):
        single_function(bundle.shard(bundle.plan.shards[0].name), "verify")
