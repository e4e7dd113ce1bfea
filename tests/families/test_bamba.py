"""Bamba equals transformers at every position: matrices, histories and caches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.config_parts import ROPES
from tests.families.matrix_models import build_bamba, mamba_keys
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.recipes import recipe

from cetane.schema.slots import CONTRACTS

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_models(contract: str) -> None:
    assert_parity(build_bamba(), recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"attn_layer_indices": None, "mamba_d_conv": 1},
        {"attn_layer_indices": [0, 1, 2], "rope_parameters": dict(ROPES["linear"])},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
        {"mlp_bias": True, "hidden_act": "gelu", "time_step_limit": (0.9, 1.4)},
        {"tie_word_embeddings": True, "mamba_n_groups": 1},
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_bamba(**change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_scaled_residual_stream_is_the_same_model(order: str) -> None:
    scaled = recipe("readonly", "per-block", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_bamba(), scaled, UNEVEN, drafts=True)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, layers = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = kv * draw(st.sampled_from([1, 2]))
    groups = draw(st.integers(1, 3))
    values = groups * draw(st.integers(1, 2))
    return {
        "num_hidden_layers": layers,
        "attn_layer_indices": [
            *draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers))
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 12])),
        "hidden_size": heads * values * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(2, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "rope_parameters": dict(ROPES[draw(st.sampled_from(["default", "linear", "yarn"]))]),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        **mamba_keys(draw, values, groups),
    }


@settings(max_examples=8, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(build_model("bamba", **config), recipe(contract, "per-layer"), {"pieces": pieces})
