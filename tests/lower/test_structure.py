"""Which shards share a template, and which must not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cetane.errors import CetaneError
from cetane.lower.lower import Lowering
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

Make = Callable[..., Planner]


@pytest.fixture
def planner(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any], recipe: Callable[..., Recipe]
) -> Make:
    """`planner(model_type, config, **recipe options)`, per block where nothing else is said."""

    def make(
        model_type: str = "llama", config: dict[str, Any] | None = None, **options: Any
    ) -> Planner:
        options = {"layout": {"kind": "per-block"}} | options
        return Planner(in_memory(tiny_model(model_type, **(config or {}))), recipe(**options))

    return make


def structure(planner: Planner, shard: str) -> str:
    return Lowering(planner, planner.checkpoint).structure(shard)


def test_kinds_of_a_llama(planner: Make) -> None:
    made = planner(config={"num_hidden_layers": 3})
    kinds = Lowering(made, made.checkpoint).kinds()
    assert list(kinds.values()) == [["layer-00", "layer-01", "layer-02"], ["head-0"]]


def test_kinds_of_a_zaya(planner: Make) -> None:
    """The first router knows none before it, and the last hands nothing on."""
    config = {"num_hidden_layers": 4, "num_experts": 2, "router_hidden_size": 16,
              "moe_intermediate_size": 32, "pad_token_id": 0}  # fmt: skip
    made = planner("zaya", config)
    kinds = Lowering(made, made.checkpoint).kinds()
    assert list(kinds.values()) == [
        ["attn-00", "attn-01", "attn-02", "attn-03"],
        ["moe-00"],
        ["moe-01", "moe-02"],
        ["moe-03"],
        ["head-0"],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"contract": "blend"},
        {"contract": "stateful"},
        {"shapes": "range"},
        {"verify": 4},
        {"context": 96},
        {"tensor_layout": "ct1"},
        {"compression": {"default": "int8-per-channel"}},
        {"target": {"deployment": "iOS26"}},
    ],
)
def test_recipes_differ(options: dict[str, Any], planner: Make) -> None:
    assert structure(planner(), "layer-00") != structure(planner(**options), "layer-00")


@pytest.mark.parametrize(
    "config", [{"rms_norm_eps": 1e-3}, {"hidden_act": "relu"}, {"attention_bias": True}]
)
def test_configs_differ(config: dict[str, Any], planner: Make) -> None:
    assert structure(planner(), "layer-00") != structure(planner(config=config), "layer-00")


def test_windows_and_formats_by_name_differ(planner: Make) -> None:
    names = {"model.layers.1.mlp.up_proj.weight": "int8-per-channel"}
    made = planner(compression={"names": names})
    assert structure(made, "layer-00") != structure(made, "layer-01")


def test_constants_from_outside_count(planner: Make) -> None:
    """A tensor that is no weight is part of the program."""
    made = planner()
    for index in range(2):
        factor = torch.tensor(float(index))
        made.members[f"layer-0{index}"][0].mlp.act = partial(torch.mul, factor)
    assert structure(made, "layer-00") != structure(made, "layer-01")


def test_a_parameter_that_is_no_weight(planner: Make) -> None:
    made = planner()
    mlp = made.members["layer-00"][0].mlp
    mlp.extra = torch.nn.Parameter(torch.empty(96, 1, 1, device="meta"))
    mlp.act = lambda x: x * mlp.extra
    with pytest.raises(CetaneError, match="not in its weights"):
        structure(made, "layer-00")
