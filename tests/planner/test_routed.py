"""Plans of ZAYA: histories, and routes that send tokens to experts."""

import json
import time
from typing import Any

import pytest
from tests.conftest import UnreadCheckpoint, without_weights
from tests.planner.plans import assert_modules_fit, zaya_planner

from cetane.planner import Planner
from cetane.schema.function import Function, Route, Step
from cetane.schema.interface import FromHistory
from cetane.schema.plan import Plan
from cetane.schema.recipe import parse_recipe
from cetane.schema.slots import CONTRACTS


def sources(function: Function) -> dict[str, str]:
    return {item.name: item.source.host for item in function.inputs}


def sinks(function: Function) -> dict[str, str]:
    return {item.name: item.sink.host for item in function.outputs}


def test_blocks_of_a_layer() -> None:
    blocks = {
        kind: {s.name: s.blocks for s in zaya_planner(layout={"kind": kind}).plan().shards}
        for kind in ("per-block", "per-layer", "chunks", "single")
    }
    names = ("attn-00", "moe-00", "attn-01", "moe-01")
    assert blocks["per-block"] == {name: (name,) for name in (*names, "head-0")}
    assert blocks["per-layer"] == {
        "layer-00": names[:2],
        "layer-01": names[2:],
        "head-0": ("head-0",),
    }
    assert list(blocks["chunks"].values()) == list(blocks["per-layer"].values())
    assert blocks["single"] == {"model": (*names, "head-0")}
    assert zaya_planner().plan().layers == 2


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_histories_and_the_routers_state(order: str) -> None:
    """Ports of the second layer's two blocks, for 4 tokens."""
    layout = {"kind": "per-block"}
    made = zaya_planner(tensor_layout=order, layout=layout, tokens={"verify": 4}).plan()

    def hidden(channels: int, tokens: int) -> tuple[int, ...]:
        return (1, channels, 1, tokens) if order == "c1t" else (1, channels, tokens, 1)

    attention = made.functions["attn-01", "verify"]
    assert {i.name: i.shape for i in attention.inputs} == {
        "hidden": hidden(64, 4),
        "cos_hybrid": (1, 1, 8, 4),
        "sin_hybrid": (1, 1, 8, 4),
        "mask": (1, 1, 4, 132),
        "kv_k": (1, 2, 16, 128),
        "kv_v": (1, 2, 16, 128),
        "delayed": hidden(16, 1),
        "conv": hidden(96, 2),
    }
    assert {o.name: o.shape for o in attention.outputs} == {
        "hidden_out": hidden(64, 4),
        "kv_k_out": (1, 2, 16, 4),
        "kv_v_out": (1, 2, 16, 4),
        "delayed_out": hidden(16, 4),
        "conv_out": hidden(96, 4),
    }
    names = {i.source.name for i in attention.inputs if isinstance(i.source, FromHistory)}
    assert names == {"attn-01.delayed", "attn-01.conv"}
    flows = {
        name: (sorted(sources(made.functions[name, "verify"])),
               sorted(sinks(made.functions[name, "verify"])))
        for name in ("moe-00", "moe-01")
    }  # fmt: skip
    assert flows == {
        "moe-00": (["hidden"], ["hidden_out", "router_out"]),
        "moe-01": (["hidden", "router"], ["hidden_out"]),
    }


def test_a_shards_histories_are_one_tensor() -> None:
    made = zaya_planner(layout={"kind": "single"}).plan()
    (function,) = (f for f in made.shards[0].functions if f.name == "verify")
    shapes = {i.name: i.shape for i in function.inputs}
    assert shapes["conv"] == (2, 96, 1, 2)
    assert shapes["delayed"] == (2, 16, 1, 1)
    assert set(sinks(function).values()) == {"cache", "history", "logits"}


def test_convolutions_of_one_tap_keep_nothing() -> None:
    made = zaya_planner({"cca_time0": 1, "cca_time1": 1}).plan()
    assert "conv" not in sources(made.shards[0].functions[0])


def test_routes() -> None:
    """Only routed modes have functions for experts; each takes and gives tensors alone."""
    made = zaya_planner(layout={"kind": "per-layer", "routed": ["verify", "decode"]}).plan()
    functions = [f.name for f in made.by_name["layer-01"].functions]
    experts = [f"expert-{i:02}-{mode}" for mode in ("decode", "verify") for i in range(3)]
    assert sorted(functions) == sorted(["decode", "verify", "prefill", *experts])
    step, route = made.modes["verify"].steps[2:4]
    assert step == Step(shard="layer-01", function="verify")
    assert route == Route(
        shard="layer-01",
        scores="scores",
        experts=tuple((f"expert-{i:02}-decode", f"expert-{i:02}-verify") for i in range(3)),
    )
    assert made.modes["decode"].steps[3] == route
    assert made.modes["prefill"].steps[1:] == (
        Step(shard="layer-01", function="prefill"),
        Step(shard="head-0", function="prefill"),
    )
    router = made.functions["layer-01", "verify"]
    assert {name for name, host in sinks(router).items() if host == "tensor"} == {
        "hidden_out",
        "probabilities_out",
        "scores_out",
    }
    expert, skip = (made.functions["layer-01", f"expert-0{i}-verify"] for i in (1, 2))
    assert sources(expert) == {"hidden": "tensor", "probabilities": "tensor"}
    assert sources(skip) == {"hidden": "tensor"}
    assert sinks(expert) == sinks(skip) == {"hidden_out": "tensor"}


def test_a_shard_of_several_layers_is_cut_where_tokens_are_routed() -> None:
    made = zaya_planner(layout={"kind": "single", "routed": ["decode"]}).plan()
    calls = [
        step.function if isinstance(step, Step) else "route" for step in made.modes["decode"].steps
    ]
    assert calls == ["decode-00", "route", "decode-01", "route", "decode-02"]
    steps = made.modes["verify"].steps
    assert [s.function for s in steps] == ["verify-00", "verify-01", "verify-02"]
    owners = {f.owner for f in made.shards[0].functions}
    assert owners == {"model-00", "model-01", "model-02"}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("routed", [[], ["decode"], ["decode", "verify", "prefill"]], ids=str)
@pytest.mark.parametrize("kind", ["per-block", "chunks", "single"])
def test_modules_of_a_routed_plan(contract: str, routed: list[str], kind: str) -> None:
    made = zaya_planner(
        layout={"kind": kind, "routed": routed},
        cache={"contract": contract, "context": 64},
        tokens={"prefill": 8},
    )
    planned = made.plan()
    assert Plan.model_validate(json.loads(planned.model_dump_json())) == planned
    assert {k for k, _ in planned.functions} == set(made.members)
    for shard in planned.shards:
        assert tuple(graph.function for graph in made.graphs(shard.name)) == shard.functions
    assert_modules_fit(made)


@pytest.fixture(scope="module")
def zaya8b() -> UnreadCheckpoint:
    """transformers' own sizes of a ZAYA."""
    return without_weights({"model_type": "zaya"})


def of8b(checkpoint: UnreadCheckpoint, **content: Any) -> Plan:
    content = {
        "name": "test",
        "cache": {"context": 2048},
        "layout": {"kind": "per-block"} | content.pop("layout", {}),
        "head": {"slices": 3},
    } | content
    return Planner(checkpoint, parse_recipe(content, "test")).plan()


@pytest.mark.parametrize(
    ("compression", "attention", "experts", "head"),
    [
        # projections 5.24 M, convolutions 0.33 M; experts 16 x 12.58 M, router 0.66 M
        ({}, 11.17e6, 403.98e6, 358.1e6),
        ({"default": "int8-per-channel"}, 5.61e6, 202e6, 179e6),
        ({"default": "palette4-uniform-group32"}, 2.82e6, 101.2e6, 89.6e6),
    ],
    ids=["fp16", "int8", "palette4"],
)
def test_zaya1_8b(
    zaya8b: UnreadCheckpoint,
    compression: dict[str, Any],
    attention: float,
    experts: float,
    head: float,
) -> None:
    made = of8b(zaya8b, compression=compression)
    kinds = ("attn", "moe") * 40
    assert [shard.name[:-3] for shard in made.shards[:-3]] == list(kinds)
    assert [shard.kind for shard in made.shards] == ["layers"] * 80 + ["head"] * 3
    assert made.layers == 40
    assert made.kv_bytes[2048] == 40 * 2 * 2**20
    for shard in made.shards:
        sizes = {"attn": attention, "moe-": experts, "head": head}
        assert shard.weight_bytes == pytest.approx(sizes[shard.name[:4]], rel=0.01), shard.name
    slices = [f.outputs[0].sink for s in made.shards[-3:] for f in s.functions[:1]]
    assert [(s.start, s.stop) for s in slices] == [(n * 87424, (n + 1) * 87424) for n in range(3)]


@pytest.mark.parametrize("kind", ["per-block", "single"])
def test_a_large_plan_takes_seconds(zaya8b: UnreadCheckpoint, kind: str) -> None:
    """2283 functions: one for each of 17 experts, 40 layers and 3 modes, and those before them."""
    started = time.process_time()
    made = of8b(zaya8b, layout={"kind": kind, "routed": ["decode", "verify", "prefill"]})
    assert time.process_time() - started < 5
    assert len(made.functions) == 40 * 3 * (17 + 1) + 3 * (40 + 3 if kind == "per-block" else 1)
    routes = [step for step in made.modes["verify"].steps if isinstance(step, Route)]
    assert [len(route.experts) for route in routes] == [17] * 40
