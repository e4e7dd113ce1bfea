"""DeepSeek-V2 equals transformers at every position, though no head's key or value is ever made."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.test_llama import ROPES
from tests.families.test_mixtral import DECODE, build
from tests.families.zaya_models import recipe

from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 14,
    "routed_scaling_factor": 1.5,
}
YARN = ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.7}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contracts(contract: str) -> None:
    model = build("deepseek_v2", **CONFIG)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


def test_routed_experts_are_the_same_model() -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order="ct1", routed=DECODE, family=family)
    config = CONFIG | {"q_lora_rank": 16, "attention_bias": True, "rope_parameters": YARN}
    model = build("deepseek_v2", **config)
    assert_parity(model, routed, {"uneven": FEEDS["uneven"]}, drafts=True)


def test_the_cache_holds_only_latents() -> None:
    engine = engine_of(build("deepseek_v2", **CONFIG), recipe())
    assert engine.plan.kv_bytes[32] == 2 * 32 * (20 + 8) * CONFIG["num_hidden_layers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"kv_lora_rank": 21}, "odd"),
        ({"num_key_value_heads": 2}, "share a latent"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    model = build("deepseek_v2", **CONFIG)
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    heads, experts, layers = (draw(st.integers(1, n)) for n in (4, 5, 3))
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * draw(st.integers(3, 12)),
        "intermediate_size": draw(st.integers(1, 60)),
        "vocab_size": draw(st.integers(10, 300)),
        "q_lora_rank": draw(st.none() | st.integers(2, 20)),
        "kv_lora_rank": 2 * draw(st.integers(1, 12)),
        "qk_nope_head_dim": 2 * draw(st.integers(1, 6)),  # transformers turns no odd strides
        "qk_rope_head_dim": 2 * draw(st.integers(1, 5)),
        "v_head_dim": draw(st.integers(1, 12)),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 1.5])),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from([ROPES["default"], YARN])),
    }


@settings(max_examples=10, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    made = recipe(contract, "per-layer")
    assert_parity(build("deepseek_v2", **config), made, {"pieces": pieces})
