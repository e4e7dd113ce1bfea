"""Planners of a tiny llama and of a tiny ZAYA, and the modules that they make."""

from typing import Any

import torch
from tests.conftest import UnreadCheckpoint, build_model

from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import parse_recipe


def planner(config: dict[str, Any] | None = None, **content: Any) -> Planner:
    """For a llama; `config` is the model's, `content` the recipe's."""
    content = {"name": "test", "cache": {"context": 128}} | content
    model = build_model("llama", **(config or {}))
    return Planner(UnreadCheckpoint(model), parse_recipe(content, "test"))


def plan(config: dict[str, Any] | None = None, **content: Any) -> Plan:
    """As `planner`."""
    return planner(config, **content).plan()


TINY_ZAYA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_experts": 2,
    "moe_intermediate_size": 24,
    "router_hidden_size": 16,
}


def zaya_planner(config: dict[str, Any] | None = None, **content: Any) -> Planner:
    """As `planner`, for a ZAYA of two experts."""
    content = {"name": "test", "cache": {"context": 128}} | content
    model = build_model("zaya", **(TINY_ZAYA | (config or {})))
    return Planner(UnreadCheckpoint(model), parse_recipe(content, "test"))


def assert_modules_fit(made: Planner) -> None:
    """The modules of all functions give outputs and states of the shapes in their plan."""
    for shard in made.plan().shards:
        for block in made.members[shard.name]:
            block.to_empty(device="cpu")
        for graph in made.graphs(shard.name):
            function, module = graph.function, made.module(graph)
            inputs = [
                torch.zeros(i.shape, dtype=torch.int32 if i.dtype == "int32" else torch.float32)
                for i in function.inputs
            ]
            with torch.inference_mode():
                outputs = module(*inputs)
            assert [tuple(o.shape) for o in outputs] == [o.shape for o in function.outputs]
            assert {name: tuple(b.shape) for name, b in module.named_buffers()} == {
                state.name: state.shape for state in function.states
            }
