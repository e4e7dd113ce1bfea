"""A port that gives infinity or NaN is refused, and the first op that gives it is named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.gates.explain import explain
from cetane.gates.golden import golden
from cetane.gates.lost import origin
from cetane.gates.observe import Seen
from cetane.mil import load
from cetane.mil.program import Body, MilFunction, NamedValue, Op

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
