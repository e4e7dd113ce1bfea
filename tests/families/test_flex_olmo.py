"""FlexOlmo equals transformers at every position, in every contract, dense and routed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import ROPES
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, in_turn
from tests.families.recipes import DECODE, mixture_recipes, recipe, with_routes

from cetane.schema.recipe import Recipe

EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3}
MODELS: dict[str, dict[str, Any]] = {
    "plain": EXPERTS,
    "weights that sum to one, biases, one kv head": EXPERTS
    | {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 1},
    "a stretched table": EXPERTS | {"rope_parameters": ROPES["llama3"]},
    "all experts": {"num_experts": 3, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    model = build_mixture("flex_olmo", **MODELS[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("per-layer", 2), ("single", 4)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    """Experts add to a tensor of their own, and the norm of their sum is in the next segment."""
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, routed=DECODE, family=family)
    feeds = {name: FEEDS[name] for name in ("steps of 4", "uneven")}
    assert_parity(build_mixture("flex_olmo", **EXPERTS), routed, feeds, drafts=True)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.integers(1, 9))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "attention_bias": draw(st.booleans()),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "norm_topk_prob": draw(st.booleans()),
    }


@settings(max_examples=15, derandomize=True)
@given(configs(), mixture_recipes, st.booleans(), cuts)
def test_anything(config: dict[str, Any], made: Recipe, routed: bool, pieces: list[int]) -> None:
    if routed:
        made = with_routes(made)
    assert_parity(build_mixture("flex_olmo", **config), made, {"pieces": pieces})
