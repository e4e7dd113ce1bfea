"""Nemotron-H equals transformers at every position: layers of one part each, dense and routed."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.matrix_models import NEMOTRON_TYPES, NEMOTRONS, build_nemotron
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize(("name", "contract"), product(NEMOTRONS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    model = build_nemotron(name)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"layers_block_type": ["mlp", "linear_attention"], "conv_kernel": 1, "n_groups": 1},
        {"layers_block_type": ["full_attention", "mlp"], "mlp_bias": True},
        {"use_bias": True, "use_conv_bias": False, "attention_bias": True},
        {"mlp_hidden_act": "gelu", "mamba_hidden_act": "gelu", "time_step_min": 1.2},
        {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "mlp_bias": True},
        {"moe_shared_expert_intermediate_size": 0},  # that of an MLP
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_nemotron("mixture", **change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_routed_experts_are_the_same_model(order: str) -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order=order, routed=DECODE, family=family)
    assert_parity(build_nemotron("mixture"), routed, UNEVEN, drafts=True)


def test_what_files_say() -> None:
    """Released ones name layers by letters."""
    model = build_nemotron("mixture")
    letters = {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}
    written = model.config.to_dict() | letters
    del written["layers_block_type"]
    assert_parity(model, recipe(), UNEVEN, written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_groups": 3}, "not a multiple of 3"),
        ({"moe_latent_size": 8}, "moe_latent_size = 8, which is not supported"),
        ({"conv_kernel": 20_000}, "20000, more than"),
        ({"layers_block_type": ["mlp"] * 2000}, "num_hidden_layers = 2000, more than"),
        ({"layers_block_type": ["full_attention", "conv"]}, "conv"),
        ({"n_group": 4}, "n_group = 4"),
    ],
)
def test_configs_that_no_port_has(change: dict[str, Any], message: str) -> None:
    model = build_nemotron("mixture")
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv = draw(st.integers(1, 2))
    heads = kv * draw(st.sampled_from([1, 2]))
    groups, expert_groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    experts = expert_groups * draw(st.integers(2, 3))
    opened = draw(st.integers(1, expert_groups))
    return {
        "layers_block_type": [
            *draw(st.lists(st.sampled_from(NEMOTRON_TYPES), max_size=3)),
            "full_attention",
            "linear_attention",
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 12])),
        "hidden_size": draw(st.integers(8, 40)),
        "intermediate_size": draw(st.integers(2, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "layer_norm_epsilon": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "mlp_hidden_act": draw(st.sampled_from(["relu2", "silu"])),
        "mlp_bias": draw(st.booleans()),
        "mamba_num_heads": groups * draw(st.integers(1, 3)),
        "mamba_head_dim": draw(st.integers(2, 12)),
        "n_groups": groups,
        "ssm_state_size": draw(st.integers(2, 12)),
        "conv_kernel": draw(st.integers(1, 5)),
        "use_conv_bias": draw(st.booleans()),
        "use_bias": draw(st.booleans()),
        "time_step_min": draw(st.sampled_from([0.001, 1.2])),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, opened * experts // expert_groups)),
        "moe_intermediate_size": draw(st.integers(2, 20)),
        "moe_shared_expert_intermediate_size": draw(st.integers(0, 20)),
        "n_group": expert_groups,
        "topk_group": opened,
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }


@settings(max_examples=8, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(
        build_mixture("nemotron_h", **config), recipe(contract, "per-layer"), {"pieces": pieces}
    )
