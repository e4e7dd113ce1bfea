"""Functions of a package: shared sessions, states, flexible shapes, bad input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb
from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.mil import MilFunction, Program, SizeRange, load
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram, unsupported
from cetane.mil.fast.model import alike, differing_literals
from cetane.mil.fast.onnx_graph import OnnxGraph
from cetane.mil.fast.translate import translate

Build = Callable[..., Path]

rng = np.random.default_rng(0)


def shards(bundle: Bundle) -> list[Program]:
    return [load(path) for path in sorted(bundle.path.rglob("*.mlpackage"))]


def random_inputs(function: MilFunction) -> dict[str, np.ndarray]:
    """Inputs of the smallest or default shape; positions are 5."""
    inputs = {}
    for name, type_ in function.inputs.items():
        smallest = tuple(s.lower if isinstance(s, SizeRange) else s for s in type_.shape)
        shape = type_.default or smallest
        values = rng.standard_normal(shape) if type_.dtype == "fp16" else np.full(shape, 5)
        inputs[name] = values.astype(np.float32 if type_.dtype == "fp16" else np.int32)
    return inputs


def check_agreement(program: FastProgram, name: str) -> None:
    """Three calls in a row, with states, give what the reference gives."""
    fast = program.function(name)
    function = program.program.functions[name]
    exact = Executable(function, "fp32")
    state, exact_state = fast.make_state(), exact.make_state()
    for _ in range(3):
        inputs = random_inputs(function)
        outputs, truth = fast(inputs, state), exact(inputs, exact_state)
        assert list(outputs) == list(truth)
        for output in truth:
            np.testing.assert_allclose(outputs[output], truth[output], rtol=1e-4, atol=1e-5)
        for cell, tensor in exact_state.tensors.items():
            np.testing.assert_allclose(state.arrays[cell], tensor.numpy(), rtol=1e-4, atol=1e-5)


def test_every_cache_contract(variant: Bundle) -> None:
    for program in shards(variant):
        shared = FastProgram(program)
        first = shared.shared(next(iter(program.functions)))
        assert all(shared.shared(name) is first for name in program.functions)  # weights are once
        for name in program.functions:
            check_agreement(shared, name)


@pytest.mark.parametrize("format_", ["int8-per-channel", "palette4-uniform-group16"])
def test_compressed_weights(tiny_bundle: Callable[..., Bundle], format_: str) -> None:
    bundle = tiny_bundle(compression={"default": format_}, verify=None)
    for program in shards(bundle):
        check_agreement(FastProgram(program), "decode")


@pytest.mark.parametrize(("shift", "length", "differing"), [(1.0, 2, 0), (2.0, 2, 1), (1.0, 3, 0)])
def test_graphs_that_differ_in_sizes_and_small_constants_are_alike(
    build: Build, shift: float, length: int, differing: int
) -> None:
    def graph(shift: float, length: int) -> OnnxGraph:
        path = build({"x": ((length,), "fp32")}, lambda x: mb.add(x=x, y=np.float32(shift)))
        return translate(load(path).functions["main"])

    one, other = graph(1.0, 2), graph(shift, length)
    assert alike(one, other)
    assert len(differing_literals([one, other])) == differing


def test_graphs_with_other_weights_or_ops_are_not_alike(build: Build) -> None:
    def graph(op: Any, weight: np.ndarray) -> OnnxGraph:
        path = build({"x": ((2, 100), "fp32")}, lambda x: op(x=x, y=weight))
        return translate(load(path).functions["main"])

    weight = rng.standard_normal(100).astype(np.float32)
    one = graph(mb.mul, weight)
    assert not alike(one, graph(mb.mul, 2 * weight))
    assert not alike(one, graph(mb.add, weight))


class Flexible(torch.nn.Module):
    """Ops that rewrites look at, on an axis of unknown length: convolutions of one input, halves,
    a part of the input, a product of two unknown axes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(8, 8, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.one(x), self.two(x)], 1)
        swapped = torch.cat([-y[:, 8:], y[:, :8]], 1) * x.mean() + y
        rows = swapped.squeeze(2)
        return torch.softmax(rows.transpose(1, 2) @ rows, -1)[:, 1:].reshape(1, -1, x.shape[3])


@pytest.mark.parametrize(
    "shape",
    [
        ct.Shape((1, 8, 1, ct.RangeDim(2, 9, default=4))),
        ct.EnumeratedShapes([(1, 8, 1, 2), (1, 8, 1, 4), (1, 8, 1, 9)], default=(1, 8, 1, 4)),
    ],
    ids=["range", "enumerated"],
)
def test_flexible_inputs(tmp_path: Path, shape: Any) -> None:
    model = Flexible().eval()
    traced = torch.jit.trace(model, torch.randn(1, 8, 1, 4))
    inputs = [ct.TensorType("x", shape=shape)]
    options = {"compute_precision": ct.precision.FLOAT32, "skip_model_load": True}
    ct.convert(traced, inputs=inputs, **options).save(str(tmp_path / "flexible.mlpackage"))
    function = FastProgram(load(tmp_path / "flexible.mlpackage")).function("main")
    for length in (9, 2, 4):
        x = torch.randn(1, 8, 1, length)
        (y,) = function({"x": x.numpy()}).values()
        np.testing.assert_allclose(y, model(x).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(CetaneError, match="input x"):
        function({"x": np.zeros((1, 8, 1, 10), np.float32)})


def accumulate(x: Any, total: Any) -> Any:
    mb.coreml_update_state(state=total, value=mb.add(x=mb.read_state(input=total), y=x))
    return mb.mul(x=mb.read_state(input=total), y=np.float16(2))


@pytest.fixture(scope="module")
def counter(build: Build) -> Path:
    return build({"x": ((3,), "fp16")}, accumulate, states={"total": ((3,), "fp16")})


def test_states(counter: Path) -> None:
    run = FastProgram(load(counter)).function("main")
    state = run.make_state()
    x = np.array([1, 2, 3], np.float32)
    (first,) = run({"x": x}, state).values()
    before = state.copy()
    (second,) = run({"x": x}, state).values()
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, 4 * x)
    np.testing.assert_array_equal(before.arrays["total"], x)
    np.testing.assert_array_equal(state.arrays["total"], 2 * x)


@pytest.fixture(scope="module")
def update(build: Build) -> Any:
    """The last axis of a (2, 3, 8) state, updated by (1, 3, 2) at row `row` and `position`."""

    def body(new: Any, at: Any, cache: Any) -> Any:
        end = mb.add(x=at, y=np.array([1, 0, 2], np.int32))
        written = mb.slice_update(
            x=mb.read_state(input=cache),
            update=new,
            begin=at,
            end=end,
            end_mask=[False, True, False],
        )
        mb.coreml_update_state(state=cache, value=written)
        return mb.identity(x=written)

    inputs = {"new": ((1, 3, 2), "fp16"), "at": ((3,), "int32")}
    path = build(inputs, body, states={"cache": ((2, 3, 8), "fp16")})
    return FastProgram(load(path)).function("main")


@settings(max_examples=30)
@given(row=st.integers(-2, 1), position=st.integers(-8, 6))
def test_slice_update_at_a_dynamic_position(update: Any, row: int, position: int) -> None:
    if position == -1:
        return  # two columns do not fit
    state = update.make_state()
    new = rng.standard_normal((1, 3, 2)).astype(np.float32)
    update({"new": new, "at": np.array([row, 0, position], np.int32)}, state)
    expected = np.zeros((2, 3, 8), np.float32)
    expected[row % 2, :, position % 8 : position % 8 + 2] = new
    np.testing.assert_array_equal(state.arrays["cache"], expected)


@pytest.mark.parametrize("position", [7, 8, 100])
def test_an_update_past_the_end_is_refused(update: Any, position: int) -> None:
    inputs = {"new": np.ones((1, 3, 2), np.float32), "at": np.array([0, 0, position], np.int32)}
    with pytest.raises(CetaneError, match="main"):
        update(inputs, update.make_state())


def test_inputs_of_any_float_type_and_memory_order(build: Build) -> None:
    path = build({"x": ((2, 3), "fp16")}, lambda x: mb.add(x=x, y=np.float16(1)))
    run = FastProgram(load(path)).function("main")
    x = rng.standard_normal((3, 2)).T
    for given_ in (x, x.astype(np.float16), np.asfortranarray(x.astype(np.float32))):
        (y,) = run({"x": given_}).values()
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, given_.astype(np.float32) + 1, rtol=1e-6)


def test_outputs_that_are_inputs_or_constants(build: Build) -> None:
    path = build(
        {"x": ((2,), "fp32")},
        lambda x: (mb.identity(x=x, name="same"), mb.identity(x=x, name="again")),
    )
    x = np.array([1, 2], np.float32)
    outputs = FastProgram(load(path)).function("main")({"x": x})
    for name in ("same", "again"):
        np.testing.assert_array_equal(outputs[name], x)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs x, got none"),
        ({"x": np.ones((2,), np.float32)}, "input x: expected fp16"),
        ({"x": np.ones((3,), np.int32)}, "input x: expected fp16"),
        ({"x": np.ones((3,), np.float32), "y": np.ones(1)}, "got x, y"),
    ],
)
def test_bad_inputs(counter: Path, inputs: dict[str, np.ndarray], message: str) -> None:
    run = FastProgram(load(counter)).function("main")
    with pytest.raises(CetaneError, match=message):
        run(inputs, run.make_state())


def test_a_missing_state(counter: Path) -> None:
    run = FastProgram(load(counter)).function("main")
    with pytest.raises(CetaneError, match="states total, got none"):
        run({"x": np.ones(3, np.float32)})


def test_integers_that_do_not_fit(build: Build) -> None:
    path = build({"n": ((1,), "int32")}, lambda n: mb.add(x=n, y=np.int32(1)))
    run = FastProgram(load(path)).function("main")
    with pytest.raises(CetaneError, match="do not fit int32"):
        run({"n": np.array([2**40])})


def test_unknown_function(counter: Path) -> None:
    with pytest.raises(CetaneError, match="no function 'decode'"):
        FastProgram(load(counter)).function("decode")


def test_unsupported_ops_are_named(build: Build) -> None:
    path = build(
        {"x": ((2,), "fp32"), "p": ((1,), "int32")},
        lambda x, p: mb.cond(
            pred=mb.cast(x=mb.squeeze(x=p), dtype="bool"),
            _true_fn=lambda: mb.add(x=x, y=x),
            _false_fn=lambda: mb.mul(x=x, y=x),
        ),
    )
    program = load(path)
    assert unsupported(program.functions["main"]) == ["cond"]
    with pytest.raises(CetaneError, match="lacks: cond"):
        FastProgram(program).function("main")
