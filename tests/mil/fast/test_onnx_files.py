"""Exported programs run in plain onnxruntime, and say what the reference says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, normal

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.executor import Executable
from cetane.mil.fast.onnx_files import WEIGHTS, export


def quiet(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("contract", ["readonly", "stateful"])
def test_a_bundle(tiny_bundle: Callable[..., Bundle], contract: str, tmp_path: Path) -> None:
    bundle = tiny_bundle(contract=contract, compression={"default": "palette4-uniform-group16"})
    program = load(bundle.shard(bundle.plan.shards[0].name))
    files = export(program, tmp_path, quiet)
    assert set(files) == set(program.functions)
    for name, file in files.items():
        onnx.checker.check_model(str(file), full_check=True)
        session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        function = program.functions[name]
        exact = Executable(function, "fp32")
        given = {}
        for key, type_ in function.inputs.items():
            integer = type_.dtype == "int32"
            shape = type_.static_shape
            given[key] = np.zeros(shape, np.int32) if integer else normal(*shape)
        state = exact.make_state()
        feeds = given | {n: t.numpy().copy() for n, t in state.tensors.items()}
        found = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)
        )
        truth = exact(given, state)
        truth |= {f"{n}_out": t.numpy() for n, t in state.tensors.items()}
        assert set(found) == set(truth)
        for output in truth:
            np.testing.assert_allclose(found[output], truth[output], rtol=1e-4, atol=1e-5)


def test_weights_are_stored_once_and_in_half(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = tiny_bundle()
    path = bundle.shard(bundle.plan.shards[0].name)
    export(load(path), tmp_path, quiet)
    packed = sum(f.stat().st_size for f in path.rglob("weight.bin"))
    assert len(load(path).functions) > 1
    assert (tmp_path / WEIGHTS).stat().st_size < 1.5 * packed


def test_floats_that_half_cannot_hold(build: Build, tmp_path: Path) -> None:
    weight = np.full((1, 100), 1e-7, np.float32)
    path = build({"x": ((1, 100), "fp32")}, lambda x: mb.add(x=x, y=weight))
    (file,) = export(load(path), tmp_path, quiet).values()
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.zeros((1, 100), np.float32)})
    np.testing.assert_array_equal(y, weight)


def test_an_op_without_a_form(build: Build, tmp_path: Path) -> None:
    path = build({"x": ((2, 3), "fp32")}, lambda x: mb.elu(x=x, alpha=np.float32(1)))
    with pytest.raises(CetaneError, match=r"main has ops without an ONNX form .*: elu") as caught:
        export(load(path), tmp_path, quiet)
    assert caught.value.hint and "torch.onnx" in caught.value.hint
    assert "executor" not in f"{caught.value} {caught.value.hint}"
