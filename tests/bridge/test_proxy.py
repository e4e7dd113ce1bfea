"""What coremltools does on a Mac, done here: predictions, states, functions, compiled models."""

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.models._compiled_model as ct_compiled
import coremltools.models.compute_device as ct_device
import coremltools.models.compute_plan as ct_plan
import coremltools.models.model as ct_model
import coremltools.models.utils as ct_utils
import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb

from cetane import bridge
from cetane.bridge.__main__ import main
from cetane.errors import CetaneError

from .conftest import accumulate, convert

X = np.random.default_rng(0).standard_normal((1, 4), np.float32)


def names() -> dict[str, Any]:
    """Everything that the bridge may replace."""
    modules = (ct_model, ct_compiled, ct_utils, ct_plan, ct_device)
    found = {f"{m.__name__}.{key}": value for m in modules for key, value in vars(m).items()}
    return found | {"library": sys.modules.get("coremltools.libcoremlpython")}


def test_uninstall_restores_every_name() -> None:
    before = names()
    assert not bridge.installed()
    assert bridge.install() and bridge.install(precision="fp16") and bridge.installed()
    assert names() != before
    bridge.uninstall()
    bridge.uninstall()
    assert names() == before and not bridge.installed()


def test_unknown_precision() -> None:
    with pytest.raises(CetaneError, match="precision 'int8' is not known"):
        bridge.install(precision="int8")


def test_nothing_happens_where_core_ml_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct_model, "_MLModelProxy", object)
    assert bridge.install() is False
    assert ct_model._MLModelProxy is object and not bridge.installed()


def test_coremltools_keeps_its_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="coremltools"):
        bridge.install()
        try:
            convert(torch.nn.Linear(4, 3), torch.zeros(1, 4)).predict({"x": X})
            assert logging.getLogger("coremltools").level == logging.WARNING
        finally:
            bridge.uninstall()


@pytest.mark.parametrize("fast", [True, False])
def test_state(fast: bool) -> None:
    bridge.install(fast=fast)
    try:
        torch_model, model = accumulate()
        state = model.make_state()
        with torch.no_grad():
            step = torch_model.linear(torch.from_numpy(X)).numpy()
        for count in (1, 2, 3):
            y = model.predict({"x": X}, state)["y"]
            np.testing.assert_allclose(y, count * step, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(state.read_state("total"), y, rtol=1e-3)
        state.write_state("total", np.zeros((1, 3)))
        y = model.predict({"x": X}, state)["y"]
        np.testing.assert_allclose(y, step, rtol=1e-2, atol=1e-2)
        with pytest.raises(RuntimeError, match=r"there is no state 'x': .* total"):
            state.read_state("x")
        with pytest.raises(RuntimeError, match=r"state total: expected fp16 \(1, 3\)"):
            state.write_state("total", np.zeros(2))
        with pytest.raises(RuntimeError, match="has the states total, got none"):
            model.predict({"x": X})
    finally:
        bridge.uninstall()


@pytest.mark.usefixtures("bridged")
def test_batches_and_shapes() -> None:
    linear = torch.nn.Linear(4, 3)
    shape = (ct.RangeDim(1, 3, default=1), 4)
    model = convert(linear, torch.zeros(1, 4), inputs=[ct.TensorType("x", shape=shape)])
    batch = [np.full((n, 4), n, np.float32) for n in (1, 2, 3)]
    for x, result in zip(batch, model.predict([{"x": x} for x in batch]), strict=True):
        truth = linear(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(result["y"], truth, rtol=1e-5, atol=1e-6)
    assert model.load_duration_in_nano_seconds > 0
    with pytest.raises(
        RuntimeError, match=r"Size \(4\) of dimension \(0\) is not in .* \(1\.\.3\)"
    ):
        model.predict({"x": np.zeros((4, 4), np.float32)})


@pytest.mark.usefixtures("bridged")
def test_compiled_models(tmp_path: Path) -> None:
    _, model = accumulate()
    truth = model.predict({"x": X}, model.make_state())["y"]
    folder = str(tmp_path / "model.mlmodelc")
    assert ct_utils.compile_model(model.package_path, folder) == folder
    asset = ct_model.MLModelAsset.from_path(folder)
    for path in (folder, model.get_compiled_model_path()):
        compiled = ct.models.CompiledMLModel(path, ct.ComputeUnit.CPU_ONLY)
        np.testing.assert_array_equal(compiled.predict({"x": X}, compiled.make_state())["y"], truth)
    compiled = ct.models.CompiledMLModel.from_asset(asset)
    np.testing.assert_array_equal(compiled.predict({"x": X}, compiled.make_state())["y"], truth)


@pytest.mark.usefixtures("bridged")
@pytest.mark.parametrize("others", [{}, {"weights/others/weight.bin": b""}])
def test_asset_from_memory(others: dict[str, bytes]) -> None:
    """Weight files have paths: others may have the same base name."""
    linear = torch.nn.Linear(64, 64)
    model = convert(linear, torch.zeros(1, 64))
    weights = Path(model.weights_dir) / "weight.bin"
    asset = ct_model.MLModelAsset.from_memory(
        model.get_spec().SerializeToString(),
        {"weights/weight.bin": weights.read_bytes(), **others},
    )
    x = torch.randn(1, 64)
    (y,) = ct.models.CompiledMLModel.from_asset(asset).predict({"x": x.numpy()}).values()
    np.testing.assert_allclose(y, linear(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("bridged")
@pytest.mark.parametrize(
    ("specification", "blobs", "why"),
    [
        (b"garbage", {}, "cannot be parsed"),
        (b"", {"weights/../../weight.bin": b""}, r"'\.\.' is not a name of a weight file"),
    ],
)
def test_an_asset_that_cannot_be_made_leaves_nothing(
    specification: bytes,
    blobs: dict[str, bytes],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=why):
        ct_model.MLModelAsset.from_memory(specification, blobs)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("bridged")
def test_multifunction(tmp_path: Path) -> None:
    linear = torch.nn.Linear(4, 3)
    description = ct.utils.MultiFunctionDescriptor()
    for name, tokens in (("decode", 1), ("prefill", 4)):
        path = str(tmp_path / f"{name}.mlpackage")
        convert(linear, torch.zeros(tokens, 4)).save(path)
        description.add_function(path, "main", name)
    description.default_function_name = "decode"
    path = str(tmp_path / "both.mlpackage")
    ct.utils.save_multifunction(description, path)
    for name, tokens in ((None, 1), ("decode", 1), ("prefill", 4)):
        model = ct.models.MLModel(path, function_name=name)
        assert model.predict({"x": np.zeros((tokens, 4), np.float32)})["y"].shape == (tokens, 3)


@pytest.mark.usefixtures("bridged")
def test_pipeline() -> None:
    one, two = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    first = convert(one, torch.zeros(1, 4), outputs=[ct.TensorType("h")])
    second = convert(two, torch.zeros(1, 3), inputs=[ct.TensorType("h", shape=(1, 3))])
    pipeline = ct_utils.make_pipeline(first, second)
    truth = two(one(torch.from_numpy(X))).detach()
    assert list(pipeline.predict({"x": X})) == ["y"]
    np.testing.assert_allclose(pipeline.predict({"x": X})["y"], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("bridged")
def test_optional_input_has_its_default() -> None:
    @mb.program(
        input_specs=[mb.TensorSpec(shape=(2,)), mb.TensorSpec(shape=(2,))],
        opset_version=ct.target.iOS16,
    )
    def program(x: Any, z: Any) -> Any:
        return mb.add(x=x, y=z, name="y")

    inputs = [
        ct.TensorType("x", shape=(2,)),
        ct.TensorType("z", shape=(2,), default_value=np.full(2, 5, np.float32)),
    ]
    model = ct.convert(program, inputs=inputs, minimum_deployment_target=ct.target.iOS16)
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(model.predict({"x": x})["y"], [6, 7])
    np.testing.assert_array_equal(model.predict({"x": x, "z": x})["y"], [2, 4])


@pytest.mark.usefixtures("bridged")
def test_what_needs_a_mac_says_so() -> None:
    with pytest.raises(NotImplementedError, match="listing compute devices needs Core ML"):
        ct.models.MLModel.get_available_compute_devices()
    with pytest.raises(NotImplementedError, match="MLComputePlan needs Core ML"):
        ct_plan.MLComputePlan.load_from_path("model.mlmodelc")


@pytest.mark.usefixtures("bridged")
def test_a_model_that_cannot_run_is_converted_with_a_warning() -> None:
    @mb.program(input_specs=[mb.TensorSpec(shape=(2,))])
    def program(x: Any) -> Any:
        return mb.add(x=x, y=x)

    with pytest.warns(RuntimeWarning, match="only ML programs run here"):
        model = ct.convert(program, convert_to="neuralnetwork")
    with pytest.raises(RuntimeError, match="only ML programs run here"):
        model.predict({"x": np.zeros(2)})


def test_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import coremltools.models.model as m\n"
        "print(__name__, sys.argv[1:], m._MLModelProxy.precision)\n"
    )
    main(["--precision", "fp16", str(script), "a", "-b"])
    bridge.uninstall()
    assert capsys.readouterr().out.strip() == "__main__ ['a', '-b'] fp16"
    assert sys.path[0] == str(tmp_path)
    with pytest.raises(CetaneError, match=r"absent.py is not a file \(usage: "):
        main(["absent.py"])
