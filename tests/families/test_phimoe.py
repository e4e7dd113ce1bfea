"""Phi-MoE equals transformers at every position, in every contract, dense and routed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import LONGROPE, ROPES
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import DECODE, recipe
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.phimoe import SparseMixture
from cetane.schema.slots import CONTRACTS

EXPERTS: dict[str, Any] = {"num_local_experts": 5}
FACTORS = {"short_mscale": 1.2, "long_mscale": 1.3}
LONG = LONGROPE | FACTORS | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG.pop("partial_rotary_factor")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, tied": {"attention_bias": True, "lm_head_bias": True, "tie_word_embeddings": True},
    "a window, many experts near": {"sliding_window": 7, "router_jitter_noise": 0.2},
    "two tables": {"rope_parameters": LONG},
    "another factor": {"rope_parameters": ROPES["yarn"] | FACTORS
                       | {"original_max_position_embeddings": 64}},
}  # fmt: skip


def build(**config: Any) -> Any:
    return build_mixture("phimoe", **EXPERTS | config)


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    assert_parity(build(**MODELS[name]), recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


def test_routed_experts_are_the_same_model() -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order="ct1", routed=DECODE, family=family)
    model = build(router_jitter_noise=0.2)
    assert_parity(model, routed, {"uneven": FEEDS["uneven"]}, drafts=True)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3, 1.0])
def test_the_weights_are_those_of_sparsemixer(noise: float) -> None:
    """Some logits are equal, and some lie near each other, above zero and below."""
    logits = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)).mul(4).round() / 4
    logits[::2] -= 3
    mixture = SparseMixture(
        hidden=1, inner=1, count=6, chosen=2, normalised=False, act="silu", together=1,
        near=2 * noise,
    )  # fmt: skip
    weights = mixture.weigh(logits.T.reshape(1, 6, 1, 64), Axes())[0, :, 0].T
    shares, taken = sparsemixer(logits, noise, training=False)
    torch.testing.assert_close(weights, torch.zeros(64, 6).scatter(1, taken, shares))


def test_a_context_ends_before_the_other_tables() -> None:
    engine = engine_of(build(rope_parameters=LONG), recipe())
    assert engine.plan.recipe.cache.context == 32
    with pytest.raises(CetaneError, match="other rotary tables after 16 positions"):
        engine_of(build(rope_parameters=LONG | {"original_max_position_embeddings": 16}), recipe())


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("router_jitter_noise", -0.1, "router_jitter_noise = -0.1, not 0 or more"),
        ("num_local_experts", 1, "a token takes 2 experts of 1"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
         "short_mscale"),
    ],
)  # fmt: skip
def test_what_no_model_has(key: str, value: Any, why: str) -> None:
    model = build()
    config = model.config.to_dict() | {key: value}
    with pytest.raises(CetaneError, match=why):
        engine_of(model, recipe(), config)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    dim = draw(st.sampled_from([8, 12]))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_size": kv * ratio * dim,
        "intermediate_size": draw(st.integers(1, 30)),
        "vocab_size": draw(st.integers(10, 300)),
        "num_local_experts": draw(st.integers(2, 7)),
        "router_jitter_noise": draw(st.sampled_from([0.0, 0.01, 0.1, 1.0, 2.0])),
        "sliding_window": draw(st.none() | st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "lm_head_bias": draw(st.booleans()),
    }


@settings(max_examples=12, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(build(**config), recipe(contract, "per-layer", slices=2), {"pieces": pieces})
