"""What a package says about itself, and running it: interfaces, functions, states, control flow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb

from cetane.errors import CetaneError
from cetane.mil import Executable, SizeRange, TensorType, load
from cetane.mil.ops import OPS

Build = Callable[..., Path]


def convert(model: torch.nn.Module, example: tuple[torch.Tensor, ...], **options: Any) -> Any:
    return ct.convert(
        torch.jit.trace(model.eval(), example),
        outputs=[ct.TensorType("y")],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
        **options,
    )


def test_interface(build: Build) -> None:
    path = build(
        {"x": ((2, 3), "fp16"), "n": ((1,), "int32")},
        lambda x, n: (mb.add(x=x, y=x, name="twice"), mb.cast(x=n, dtype="fp32", name="real")),
    )
    program = load(path)
    function = program.functions["main"]
    assert function.inputs == {"x": TensorType((2, 3), "fp16"), "n": TensorType((1,), "int32")}
    assert function.outputs == {
        "twice": TensorType((2, 3), "fp16"),
        "real": TensorType((1,), "fp32"),
    }
    assert [(op.kind, op.name) for op in function.ops if op.kind != "const"] == [
        ("add", "twice"),
        ("cast", "real"),
    ]


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(-1, 3, x.shape[1])


def flexible(tmp_path: Path, shape: Any) -> tuple[Linear, Path]:
    model = Linear()
    path = tmp_path / "flexible.mlpackage"
    inputs = [ct.TensorType("x", shape=shape)]
    precision = ct.precision.FLOAT32
    convert(model, (torch.zeros(1, 5, 4),), inputs=inputs, compute_precision=precision).save(
        str(path)
    )
    return model, path


def test_range_of_shapes(tmp_path: Path) -> None:
    model, path = flexible(tmp_path, (1, ct.RangeDim(2, 8, default=5), 4))
    function = load(path).functions["main"]
    assert function.inputs["x"] == TensorType((1, SizeRange(2, 8), 4), "fp32", default=(1, 5, 4))
    run = Executable(function)
    for length in (2, 8):
        x = torch.randn(1, length, 4)
        (y,) = run({"x": x.numpy()}).values()
        np.testing.assert_allclose(y, model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(CetaneError, match=r"input x: expected fp32 \(1, 2\.\.8, 4\), got .*9"):
        run({"x": np.zeros((1, 9, 4), np.float32)})


def test_enumerated_shapes(tmp_path: Path) -> None:
    shapes = ct.EnumeratedShapes([(1, 2, 4), (1, 5, 4)], default=(1, 5, 4))
    model, path = flexible(tmp_path, shapes)
    function = load(path).functions["main"]
    assert function.inputs["x"].default == (1, 5, 4)
    assert set(function.inputs["x"].enumerated) == {(1, 2, 4), (1, 5, 4)}
    run = Executable(function)
    x = torch.randn(1, 2, 4)
    (y,) = run({"x": x.numpy()}).values()
    np.testing.assert_allclose(y, model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(CetaneError, match="input x"):
        run({"x": np.zeros((1, 3, 4), np.float32)})


def test_multifunction_with_shared_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    description = ct.utils.MultiFunctionDescriptor()
    for name, tokens in (("decode", 1), ("prefill", 4)):
        path = tmp_path / f"{name}.mlpackage"
        inputs = [ct.TensorType("x", shape=(tokens, 64))]
        convert(model, (torch.zeros(tokens, 64),), inputs=inputs).save(str(path))
        description.add_function(str(path), "main", name)
    description.default_function_name = "decode"
    path = tmp_path / "both.mlpackage"
    ct.utils.save_multifunction(description, str(path))

    program = load(path)
    assert set(program.functions) == {"decode", "prefill"}
    for name, tokens in (("decode", 1), ("prefill", 4)):
        function = program.functions[name]
        assert function.inputs["x"].shape == (tokens, 64)
        x = torch.randn(tokens, 64)
        (y,) = Executable(function, "fp16")({"x": x.numpy()}).values()
        np.testing.assert_allclose(y, model(x).detach(), rtol=1e-2, atol=1e-2)


class Cache(torch.nn.Module):
    """Writes each row at its position and returns the sum of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2))

    def forward(self, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.cache.mul_(1 - mask)
        self.cache.add_(mask * row)
        return self.cache.sum(0)


@pytest.fixture
def cache(tmp_path: Path) -> Executable:
    model = convert(
        Cache(),
        (torch.zeros(2), torch.zeros(4, 1)),
        inputs=[ct.TensorType("row", shape=(2,)), ct.TensorType("mask", shape=(4, 1))],
        states=[ct.StateType(ct.TensorType(shape=(4, 2), dtype=np.float16), name="cache")],
    )
    path = tmp_path / "cache.mlpackage"
    model.save(str(path))
    return Executable(load(path).functions["main"], "fp16")


def test_state_lives_between_calls(cache: Executable) -> None:
    assert cache.function.states == {"cache": TensorType((4, 2), "fp16")}
    state = cache.make_state()
    rows = np.array([[1, 2], [3, 4], [5, 6], [7, 1000]], np.float32)
    for position, row in enumerate(rows):
        if position == 2:
            before = state.copy()
        mask = np.eye(4, dtype=np.float32)[:, position : position + 1]
        total = cache({"row": row, "mask": mask}, state)["y"]
        np.testing.assert_array_equal(total, rows[: position + 1].sum(0))
    np.testing.assert_array_equal(state.tensors["cache"], rows)
    np.testing.assert_array_equal(before.tensors["cache"][2:], 0)


def test_state_must_be_given(cache: Executable) -> None:
    inputs = {"row": np.zeros(2, np.float32), "mask": np.zeros((4, 1), np.float32)}
    with pytest.raises(CetaneError, match=r"has the states cache, got none.*make_state"):
        cache(inputs)
    state = cache.make_state()
    state.tensors["cache"] = torch.zeros(2, 4)
    with pytest.raises(CetaneError, match=r"state cache: expected fp16 \(4, 2\)"):
        cache(inputs, state)


def test_update_state_returns_the_written_value(build: Build) -> None:
    def body(x: Any, memory: Any) -> Any:
        before = mb.read_state(input=memory)
        after = mb.coreml_update_state(state=memory, value=mb.add(x=before, y=x))
        return mb.sub(x=after, y=before, name="change"), mb.identity(x=after, name="after")

    path = build({"x": ((2,), "fp16")}, body, states={"memory": ((2,), "fp16")})
    run = Executable(load(path).functions["main"])
    state = run.make_state()
    x = np.array([1, 2], np.float16)
    for calls in (1, 2, 3):
        outputs = run({"x": x}, state)
        np.testing.assert_array_equal(outputs["change"], x)
        np.testing.assert_array_equal(outputs["after"], calls * x)


def test_branch_takes_one_side(build: Build) -> None:
    def body(x: Any) -> Any:
        positive = mb.squeeze(x=mb.greater(x=mb.slice_by_size(x=x, begin=[0], size=[1]), y=0.0))
        scale = mb.exp(x=x)
        return mb.cond(
            pred=positive, _true_fn=lambda: mb.mul(x=x, y=scale), _false_fn=lambda: mb.square(x=x)
        )

    run = Executable(load(build({"x": ((2,), "fp32")}, body)).functions["main"])
    for x in (np.array([1, 2], np.float32), np.array([-1, 2], np.float32)):
        (y,) = run({"x": x}).values()
        np.testing.assert_allclose(y, x * np.exp(x) if x[0] > 0 else x**2, rtol=1e-6)


def test_loop_runs_until_its_condition_fails(build: Build) -> None:
    def body(x: Any, limit: Any) -> Any:
        step = mb.exp(x=x)
        end = mb.squeeze(x=limit)
        return mb.while_loop(
            _cond=lambda total, count: mb.less(x=count, y=end),
            _body=lambda total, count: (mb.add(x=total, y=step), mb.add(x=count, y=1)),
            loop_vars=(x, 0),
        )[0]

    path = build({"x": ((2,), "fp32"), "limit": ((1,), "int32")}, body)
    run = Executable(load(path).functions["main"])
    x = np.array([0.5, 2], np.float32)
    for count in (0, 3):
        (y,) = run({"x": x, "limit": np.array([count], np.int32)}).values()
        np.testing.assert_allclose(y, x + count * np.exp(x), rtol=1e-6)


def test_watch_sees_every_intermediate(build: Build) -> None:
    path = build(
        {"x": ((2,), "fp32")}, lambda x: mb.square(x=mb.exp(x=x, name="inner"), name="outer")
    )
    seen: dict[str, torch.Tensor] = {}
    x = np.array([0, 1], np.float32)
    Executable(load(path).functions["main"])({"x": x}, watch=seen.__setitem__)
    assert list(seen) == ["inner", "outer"]
    np.testing.assert_allclose(seen["inner"], np.exp(x), rtol=1e-6)


def test_outputs_do_not_share_memory_with_the_program(build: Build) -> None:
    table = np.arange(12, dtype=np.float32)
    path = build({"x": ((1,), "fp32")}, lambda x: (mb.identity(x=x), mb.const(val=table, name="t")))
    run = Executable(load(path).functions["main"])
    x = np.zeros(1, np.float32)
    run({"x": x})["t"][:] = -1
    np.testing.assert_array_equal(run({"x": x})["t"], table)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "has the inputs n, x, got none"),
        ({"x": np.zeros((2, 3)), "m": np.zeros(1, int)}, "has the inputs n, x, got m, x"),
        ({"x": np.zeros((3, 2)), "n": np.zeros(1, int)}, r"input x: expected fp16 \(2, 3\)"),
        ({"x": np.zeros((2, 3), int), "n": np.zeros(1, int)}, "input x: expected fp16.*got int64"),
        ({"x": np.zeros((2, 3)), "n": np.zeros(1)}, "input n: expected int32.*got float64"),
        ({"x": np.zeros((2, 3)), "n": np.array([2**40])}, "input n: .*do not fit int32"),
    ],
)
def test_wrong_inputs_are_named(build: Build, inputs: dict[str, np.ndarray], message: str) -> None:
    path = build(
        {"x": ((2, 3), "fp16"), "n": ((1,), "int32")},
        lambda x, n: (mb.identity(x=x), mb.identity(x=n)),
    )
    run = Executable(load(path).functions["main"])
    with pytest.raises(CetaneError, match=message):
        run(inputs)


def test_unknown_precision(build: Build) -> None:
    function = load(build({"x": ((1,), "fp32")}, lambda x: mb.exp(x=x))).functions["main"]
    with pytest.raises(CetaneError, match="precision 'int8' is not known"):
        Executable(function, "int8")  # type: ignore[arg-type]


def test_failing_op_is_named(build: Build) -> None:
    path = build(
        {"x": ((3,), "fp32"), "i": ((1,), "int32")},
        lambda x, i: mb.gather(x=x, indices=i, name="look"),
    )
    run = Executable(load(path).functions["main"])
    with pytest.raises(CetaneError, match=r"function main, gather look: .*out of"):
        run({"x": np.zeros(3, np.float32), "i": np.array([7], np.int32)})


def test_missing_ops_are_listed_at_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Any) -> Any:
        image = mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, name="up")
        image = mb.upsample_nearest_neighbor(x=image, scale_factor_height=2)
        return mb.pixel_shuffle(x=image, upscale_factor=2, name="shuffle")

    for kind in ("pixel_shuffle", "upsample_nearest_neighbor"):
        monkeypatch.delitem(OPS, kind)
    function = load(build({"x": ((1, 4, 2, 2), "fp32")}, body)).functions["main"]
    with pytest.raises(CetaneError) as error:
        Executable(function)
    assert "pixel_shuffle (first: shuffle)" in str(error.value)
    assert "upsample_nearest_neighbor (first: up)" in str(error.value)
