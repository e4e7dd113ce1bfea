"""A port that gives infinity or NaN is refused, and the first op that gives it is named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.gates.explain import explain, explain_ladder
from cetane.gates.golden import golden
from cetane.gates.ladder import ladder
from cetane.gates.lost import origin
from cetane.gates.observe import Seen
from cetane.mil import load
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType
from cetane.planner import Planner

from .conftest import with_ops


def roots(op: Op) -> list[Op]:
    """The op; of a SiLU its square root, which is NaN for most channels."""
    if op.kind != "silu":
        return [op]
    (made,) = op.outputs
    inner = NamedValue(f"{made.name}_inner", made.type)
    return [
        replace(op, outputs=(inner,)),
        Op("sqrt", f"root_of_{op.name}", {"x": (inner.name,)}, (made,)),
    ]


def test_a_program_that_gives_nan(
    good: Bundle,
    checkpoint: Checkpoint,
    asked: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy decoding goes on, and answers what the model would not."""
    asked("evidence", positions=48, most=48)
    for module in ("engine.portable", "gates.twin"):
        monkeypatch.setattr(f"cetane.{module}.load", lambda path: with_ops(load(path), roots))
    found = golden(good, checkpoint, lambda *_: None, greedy_tokens=12)
    red = {check.name.partition(":")[0] for check in found.checks if not check.passed}
    assert red == {"structure", "compression, good", "fp16"}
    assert found.greedy == (0.0, 0.0)
    assert found.lost is not None
    assert (found.lost.shard, found.lost.kind) == ("chunk-00", "sqrt")
    assert found.lost.place.startswith("after layer-00/mlp_")
    assert np.isfinite(found.lost.inputs)
    why = explain(good, checkpoint, found)
    assert why is not None and why.cause == "conversion"
    assert "has infinity or NaN after model.layers.1" in why.sentence
    assert why.sentence.endswith(found.lost.told)


def test_first_shards_that_give_nan(
    good: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.gates.twin.load", lambda path: with_ops(load(path), roots))
    planner = Planner(checkpoint, good.plan.recipe)
    found = ladder(checkpoint, planner, {"chunk-00": good.shard("chunk-00")})
    assert not found.passed
    assert found.lost is not None
    assert (found.lost.shard, found.lost.kind) == ("chunk-00", "sqrt")
    why = explain_ladder(found, checkpoint, good.plan.recipe)
    assert why.cause == "conversion"
    assert why.sentence.endswith(found.lost.told)


def literal(value: np.ndarray, dtype: str) -> StoredConstant:
    return StoredConstant(TensorType(value.shape, dtype), lambda: value)


def sums_of_exponentials(op: Op) -> list[Op]:
    """The op; a softmax also times 1, from a sum over keys that fp16 holds of some 150 keys."""
    if op.kind != "softmax":
        return [op]
    (made,) = op.outputs
    assert made.type is not None
    whole, row = made.type, replace(made.type, shape=(*made.type.shape[:-1], 1))
    share, exp = (NamedValue(f"{made.name}_{n}", whole) for n in ("share", "exp"))
    total, times, more, one = (
        NamedValue(f"{made.name}_{n}", row) for n in ("total", "times", "more", "one")
    )
    axes, keep = literal(np.array([-1], np.int32), "int32"), literal(np.array(True), "bool")
    large = literal(np.array(400, np.float16), "fp16")
    return [
        replace(op, outputs=(share,)),
        Op("exp", exp.name, {"x": op.inputs["x"]}, (exp,)),
        Op("reduce_sum", total.name,
           {"x": (exp.name,), "axes": (axes,), "keep_dims": (keep,)}, (total,)),
        Op("mul", times.name, {"x": (total.name,), "y": (large,)}, (times,)),
        Op("add", more.name, {"x": (times.name,), "y": (large,)}, (more,)),
        Op("real_div", one.name, {"x": (more.name,), "y": (more.name,)}, (one,)),
        Op("mul", made.name, {"x": (share.name,), "y": (one.name,)}, (made,)),
    ]  # fmt: skip


def test_nan_that_comes_late_in_the_context(
    checkpoint: Checkpoint,
    tiny_bundle: Callable[..., Bundle],
    asked: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only an ANE's arithmetic is asked there, after a text that another one read."""
    asked("evidence", positions=48, most=48)
    bundle = tiny_bundle(context=256, verify=None, layout={"kind": "single"})
    for module in ("engine.portable", "gates.twin"):
        monkeypatch.setattr(
            f"cetane.{module}.load", lambda path: with_ops(load(path), sums_of_exponentials)
        )
    found = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    assert {c.name.partition(":")[0] for c in found.checks if not c.passed} == {"ane"}
    assert found.lost is not None
    assert (found.lost.shard, found.lost.kind) == ("model", "mul")
    why = explain(bundle, checkpoint, found)
    assert why is not None and why.cause == "fp16 range"
    assert "At the end of 256 tokens, model (" in why.sentence
    assert why.sentence.endswith(found.lost.told)


def test_infinity_that_does_no_harm() -> None:
    """As of an exponential that something divides by. A result that has some is followed back."""
    values = {name: NamedValue(name, None) for name in "abcd"}
    ops = (
        Op("exp", "a", {"x": ("x",)}, (values["a"],)),
        Op("inverse", "b", {"x": ("a",)}, (values["b"],)),
        Op("log", "c", {"x": ("b",)}, (values["c"],)),
        Op("mul", "d", {"x": ("c",), "y": ("b",)}, (values["d"],)),
    )
    function = MilFunction("main", {}, {}, {}, Body((), ops, ("b", "d")))
    harmless = {"x": 90.0, "a": float("inf"), "b": 0.0, "c": 2.0, "d": 0.0}
    assert origin(function, harmless) is None
    nan = float("nan")
    assert origin(function, {**harmless, "a": 1.0, "c": nan, "d": nan}) == ops[2]


def test_tokens_without_a_row_are_not_lost() -> None:
    """A head of some tokens leaves the others at minus infinity."""
    seen = Seen(np.array([[1.0, -np.inf, 2.0]]), np.array([0]), {})
    assert seen.finite(np.array([0, 2]))
    assert not seen.finite(slice(0, 3))
