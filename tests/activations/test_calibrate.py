"""Ranges, against numpy and against coremltools as it is."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.optimize.coreml.experimental import (
    _model_debugger,
    _post_training_quantization,
)

from cetane import bridge
from cetane.activations.calibrate import bridged, calibrate, measured_ranges
from cetane.activations.passes import quantize_package
from cetane.activations.samples import random_samples
from cetane.activations.temporary import temporary_folder
from cetane.bundle import Bundle
from cetane.engine.backend import Arrays
from cetane.errors import CetaneError
from cetane.lower.package import single_function
from cetane.mil import load
from cetane.mil.executor import Executable
from cetane.mil.lineage import Lineage

SHARD = "head-0"
"""A norm and a projection: small, and quick."""


@pytest.fixture(scope="module")
def package(bundle: Bundle) -> Path:
    return bundle.shard(SHARD)


@pytest.fixture(scope="module")
def calls(bundle: Bundle) -> list[Arrays]:
    """Calls of decode, of which the first is the widest."""
    found = random_samples(bundle.plan.by_name[SHARD])["decode"]
    return [{n: v * scale for n, v in call.items()}
            for scale, call in zip((8, 4, 1), found, strict=False)]  # fmt: skip


def test_ranges_are_those_of_all_calls(package: Path, calls: list[Arrays]) -> None:
    found = calibrate(package, {"decode": calls})
    hidden = np.concatenate([call["hidden"] for call in calls]).astype(np.float32)
    # The norm joins x and -x, and coremltools gives what is joined one range.
    assert found["hidden"]["rmax"] == -found["hidden"]["rmin"] == pytest.approx(abs(hidden).max())
    alone = [calibrate(package, {"decode": [call]}) for call in calls]
    for name, one in found.items():
        assert one["rmin"] == min(other[name]["rmin"] for other in alone)
        assert one["rmax"] == max(other[name]["rmax"] for other in alone)


def test_coremltools_itself_keeps_the_last_call(package: Path, calls: list[Arrays]) -> None:
    """The fault that is mended; where it is not there any more, so should the mending be."""
    with temporary_folder(), bridged():
        unmended = measured_ranges(single_function(package, "decode"), calls)
    assert unmended == calibrate(package, {"decode": calls[-1:]})


def test_calls_of_several_functions_count(
    bundle: Bundle, package: Path, calls: list[Arrays]
) -> None:
    width = bundle.plan.functions[SHARD, "prefill"].tokens
    wide = {"hidden": np.repeat(2 * calls[0]["hidden"], width, axis=-1)}
    both = calibrate(package, {"decode": calls, "prefill": [wide]})
    assert both["hidden"]["rmax"] == pytest.approx(abs(wide["hidden"]).max())
    assert both.keys() == calibrate(package, {"decode": calls}).keys()


def test_coremltools_is_as_it_was(package: Path, calls: list[Arrays]) -> None:
    places: list[tuple[Any, str]] = [
        (_model_debugger, "ct"), (_model_debugger, "tqdm"), (_post_training_quantization, "tqdm"),
        (_post_training_quantization, "_update_tensor_range"),
        (_model_debugger.ModelDebugger, "record_intermediate_output"),
    ]  # fmt: skip
    before = [vars(where)[name] for where, name in places]
    with pytest.raises(RuntimeError):
        calibrate(package, {"decode": [{"hidden": calls[0]["hidden"][:, :-1]}]})
    assert [vars(where)[name] for where, name in places] == before
    assert not bridge.installed()


def test_no_calls(package: Path) -> None:
    with pytest.raises(CetaneError, match="none of its calls was recorded"):
        calibrate(package, {"decode": []})


def test_values_that_overflow(package: Path, calls: list[Arrays]) -> None:
    broken = {"hidden": np.full_like(calls[0]["hidden"], np.inf)}
    with pytest.raises(CetaneError, match="overflows"):
        calibrate(package, {"decode": [broken]})


def test_scales_are_those_of_the_ranges(package: Path, calls: list[Arrays], tmp_path: Path) -> None:
    ranges = calibrate(package, {"decode": calls})
    made = tmp_path / "made.mlpackage"
    assert quantize_package(package, ranges, "all", False, made) == 1
    for function in load(made).functions.values():
        (op,) = [op for op in function.ops if op.kind == "quantize"]
        (name,) = op.inputs["input"]
        assert isinstance(name, str)
        largest = max(-ranges[name]["rmin"], ranges[name]["rmax"])
        scale = Lineage(function).constant(op.inputs["scale"][0])
        assert scale == pytest.approx(largest / 127, rel=2e-3)


def test_a_range_that_is_missing(package: Path, calls: list[Arrays], tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="no range of"):
        quantize_package(package, {}, "all", False, tmp_path / "made.mlpackage")


def test_it_computes_what_coremltools_own_entry_point_makes(
    package: Path, calls: list[Arrays], tmp_path: Path
) -> None:
    symmetric = cto.OpLinearQuantizerConfig(mode="linear_symmetric")
    config = cto.OptimizationConfig(global_config=symmetric, op_type_configs={"add": None})
    with temporary_folder(), bridged():
        model = single_function(package, "decode")
        theirs = cto.linear_quantize_activations(model, config, [dict(calls[0])])
        wanted = [theirs.predict(call) for call in calls]
        plain = model.predict(calls[1])
    made = tmp_path / "made.mlpackage"
    quantize_package(package, calibrate(package, {"decode": calls[:1]}), "all", False, made)
    ours = Executable(load(made).functions["decode"], "fp32")
    for call, outputs in zip(calls, wanted, strict=True):
        for name, logits in outputs.items():
            np.testing.assert_allclose(ours(call)[name], logits, rtol=1e-4, atol=1e-4)
            assert not np.allclose(plain[name], wanted[1][name], rtol=1e-3, atol=1e-3)


def test_coremltools_stays_quiet_after_the_bridge() -> None:
    """Also where it is the bridge that imports it first."""
    code = (
        "import logging; from cetane.activations.calibrate import bridged\n"
        "with bridged(): pass\n"
        "assert logging.getLogger('coremltools').level == logging.ERROR"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
