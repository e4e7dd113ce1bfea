"""Jamba equals transformers at every position: states, histories, caches and experts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.matrix_models import build_jamba
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.recipes import DECODE, recipe

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("contract", ["readonly", "stateful"])
def test_models(contract: str) -> None:
    assert_parity(build_jamba(), recipe(contract, "per-layer", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 1, "mamba_d_conv": 1, "tie_word_embeddings": True},
        {"attn_layer_period": 9, "attn_layer_offset": 8, "num_experts_per_tok": 5},
        {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1,
         "expert_layer_offset": 0},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "rms_norm_eps": 0.1,
         "mamba_dt_rank": 7},
    ],
)  # fmt: skip
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_jamba(**change), recipe(), UNEVEN)


def test_routes() -> None:
    routed = recipe(kind="per-block", order="ct1", routed=DECODE, family={"together": 2})
    assert_parity(build_jamba(), routed, UNEVEN, drafts=True)


def test_a_scaled_residual_stream_is_the_same_model() -> None:
    scaled = recipe("blend", "per-block", family={"residual_scale": 2**-5})
    assert_parity(build_jamba(), scaled, UNEVEN)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, dim = draw(st.integers(1, 2)), draw(st.sampled_from([8, 12]))
    heads, count = kv * draw(st.sampled_from([1, 2])), draw(st.integers(2, 6))
    attend, sparse = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "attn_layer_period": attend,
        "attn_layer_offset": draw(st.integers(0, attend - 1)),
        "expert_layer_period": sparse,
        "expert_layer_offset": draw(st.integers(0, sparse - 1)),
        "num_experts": count,
        "num_experts_per_tok": draw(st.integers(1, count)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_size": draw(st.integers(10, 60)),
        "intermediate_size": draw(st.integers(2, 40)),
        "mamba_d_state": draw(st.integers(1, 8)),
        "mamba_d_conv": draw(st.integers(1, 5)),
        "mamba_expand": draw(st.integers(1, 3)),
        "mamba_dt_rank": draw(st.integers(1, 9) | st.just("auto")),
        "mamba_proj_bias": draw(st.booleans()),
        "mamba_conv_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=6, derandomize=True)
@given(configs(), cuts)
def test_anything(config: dict[str, Any], pieces: list[int]) -> None:
    assert_parity(build_jamba(**config), recipe(kind="per-layer"), {"pieces": pieces})
