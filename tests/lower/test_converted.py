"""Functions of one form share a conversion, and are as if each was converted alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coremltools.proto import MIL_pb2, Model_pb2

from cetane.lower import convert as conversions
from cetane.lower.converted import Converted, slices_of
from cetane.lower.lower import Lowering
from cetane.lower.recorder import Slice
from cetane.lower.structure import Form
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

ZAYA = {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 32,
        "router_hidden_size": 16, "pad_token_id": 0}  # fmt: skip
QWEN = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "config", "shard", "alone"),
    [
        # the router, an expert, and the skip of all
        ("zaya", ZAYA, "moe-00", {"decode", "expert-00-decode", "expert-04-decode"}),
        # the last slice goes to the end, which programs say in another way
        ("qwen3_moe", QWEN, "moe-00", {"decode", "expert-00-decode", "expert-03-decode"}),
    ],
)
def test_experts(
    model_type: str,
    config: dict[str, Any],
    shard: str,
    alone: set[str],
    tiny_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    checkpoint = in_memory(tiny_model(model_type, **config))
    layout = {"kind": "per-block", "routed": ["decode"]}
    made = Lowering(
        Planner(checkpoint, recipe(layout=layout, verify=None, prefill=None)), checkpoint
    )
    converted: list[str] = []
    convert = conversions.convert

    def watch(planner: Any, shard: str, graph: Any, wide: Any) -> Converted:
        converted.append(graph.function.name)
        return convert(planner, shard, graph, wide)

    monkeypatch.setattr(conversions, "convert", watch)
    made.lower(shard, tmp_path / "shard.mlpackage")
    assert set(converted) == alone and len(converted) == len(alone)
    made.verify(shard, tmp_path / "shard.mlpackage")
    assert len(converted) == len(alone) + len(made.planner.graphs(shard))


def function_of(*places: Slice) -> Any:
    """A function of slices of three axes."""
    ops = []
    for number, place in enumerate(places):
        names = [f"{kind}_{number}" for kind in ("begin", "end", "end_mask")]
        values = [MIL_pb2.Value() for _ in names]
        for value, at in zip(values, (place.start, place.stop), strict=False):
            value.immediateValue.tensor.ints.values.extend(
                at if axis == place.axis else 0 for axis in range(3)
            )
        values[2].immediateValue.tensor.bools.values.extend(a != place.axis for a in range(3))
        for name, value in zip(names, values, strict=True):
            ops.append(MIL_pb2.Operation(type="const", outputs=[{"name": name}]))
            ops[-1].attributes["val"].CopyFrom(value)
        ops.append(MIL_pb2.Operation(type="slice_by_index", outputs=[{"name": f"part_{number}"}]))
        for key, name in (("x", "x"), *zip(("begin", "end", "end_mask"), names, strict=True)):
            ops[-1].inputs[key].arguments.add(name=name)
    function = MIL_pb2.Function(opset="CoreML8")
    function.block_specializations["CoreML8"].operations.extend(ops)
    return function


def converted(*places: Slice) -> Converted:
    spec = Model_pb2.Model()
    spec.mlProgram.functions["main"].CopyFrom(function_of(*places))
    return Converted(spec, {})


def form(*places: Slice) -> Form:
    return Form("main", (), (), places)


def test_slices_of_a_function() -> None:
    places = Slice(1, 2, 3), Slice(0, 0, 5)
    assert list(slices_of(function_of(*places)).values()) == list(places)
    shared = function_of(*places)
    ops = shared.block_specializations["CoreML8"].operations
    ops[-1].inputs["begin"].arguments[0].name = "begin_0"
    assert slices_of(shared) == {}


def test_what_cannot_be_renamed() -> None:
    """A slice that the program lacks, and two that are alike and differ elsewhere."""
    one, other, third = Slice(1, 0, 2), Slice(1, 2, 4), Slice(1, 4, 6)
    made = converted(one, other).renamed(form(one, other), form(one, third))
    assert made is not None and made.slices == {other: third}
    assert converted(one).renamed(form(one, other), form(one, third)) is None
    assert converted(one, one).renamed(form(one, one), form(one, other)) is None
    assert converted(one, one).renamed(form(one), form(other)) is None
