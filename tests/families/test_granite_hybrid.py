"""Granite 4.0 equals transformers at every position: matrices, histories, caches and experts."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.config_parts import MULTIPLIERS
from tests.families.matrix_models import (
    GRANITE_HYBRIDS,
    build_hybrid,
    mamba_keys,
)
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.planner import Planner
from cetane.schema.slots import CONTRACTS

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize(("name", "contract"), product(GRANITE_HYBRIDS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    model = build_hybrid(name)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
        {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "mamba_d_conv": 1},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
        {"hidden_act": "gelu", "time_step_limit": (0.9, 1.4)},
        {"intermediate_size": 0},  # that of the experts, which a dense one lacks
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    """Granite 4.0 without H is the first."""
    assert_parity(build_hybrid("dense", **change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_routed_experts_are_the_same_model(order: str) -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order=order, routed=DECODE, family=family)
    assert_parity(build_hybrid("mixture"), routed, UNEVEN, drafts=True)


def test_a_model_without_positions_has_no_table() -> None:
    model = Planner(InMemoryCheckpoint(build_hybrid("dense")), recipe()).model
    assert not model.rotary
    assert not {"rope_cos", "rope_sin"} & model.host.keys()


def test_what_files_say() -> None:
    """Released ones have other names of layers. transformers writes infinity as a table."""
    model = build_hybrid("dense")
    written = {
        "layer_types": ["mamba", "attention", "mamba"],
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    assert_parity(model, recipe(), UNEVEN, model.config.to_dict() | written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_n_groups": 3}, "not a multiple of 3"),
        ({"mamba_n_groups": 0}, "mamba_n_groups = 0"),
        ({"time_step_limit": [1.0, 0.1]}, "bounds of steps from 1.0 to 0.1"),
        ({"mamba_d_conv": 20_000}, "20000, more than"),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "sliding"),
    ],
)
def test_configs_that_no_port_has(change: dict[str, Any], message: str) -> None:
    model = build_hybrid("dense")
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


def test_flexible_shapes_are_refused() -> None:
    with pytest.raises(CetaneError, match="matrices"):
        engine_of(build_hybrid("dense"), recipe(shapes="range"))


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kv, layers = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    types = st.sampled_from(["linear_attention", "full_attention"])
    heads = kv * draw(st.sampled_from([1, 2]))
    groups, experts = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    values = groups * draw(st.integers(1, 2))
    return "granitemoehybrid", MULTIPLIERS | {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(types, min_size=layers, max_size=layers)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": heads * values * draw(st.sampled_from([8, 10])),
        "logits_scaling": 0.5,
        "intermediate_size": draw(st.integers(2, 40)),
        "shared_intermediate_size": draw(st.integers(2, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "position_embedding_type": draw(st.sampled_from([None, "rope"])),
        **mamba_keys(draw, values, groups),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(min(1, experts), experts)),
    }


@settings(max_examples=10, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: tuple[str, dict[str, Any]], contract: str, pieces: list[int]) -> None:
    if "full_attention" not in config[1]["layer_types"]:
        config[1]["layer_types"][-1] = "full_attention"
    assert_parity(
        build_mixture(config[0], **config[1]), recipe(contract, "per-layer"), {"pieces": pieces}
    )
