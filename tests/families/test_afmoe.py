"""AFMoE equals transformers at every position, in every contract, dense and routed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import ROPES
from tests.families.mixture_models import build_afmoe
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import DECODE, mixture_recipes, recipe, with_routes

from cetane.errors import CetaneError
from cetane.schema.recipe import Recipe

SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "as released": {},
    "experts everywhere, nothing slides": {"num_dense_layers": 0, "layer_types": [FULL] * 3},
    "no experts": {"num_dense_layers": 3, "mup_enabled": False},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "a stretched table": {"rope_parameters": ROPES["llama3"]},
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    model = build_afmoe(**MODELS[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("per-layer", 2), ("single", 4)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    """Experts add to what all tokens share, and the norm of the sum is in the next segment."""
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, routed=DECODE, family=family)
    feeds = {name: FEEDS[name] for name in ("steps of 4", "uneven")}
    assert_parity(build_afmoe(), routed, feeds, drafts=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_dense_layers", None),
        ("num_shared_experts", 0),
        ("num_experts_per_tok", 7),
        ("route_scale", 0.0),
        ("sliding_window", None),
        ("layer_types", ["chunked_attention"] * 3),
    ],
)
def test_configs_that_no_model_has(key: str, value: Any) -> None:
    model = build_afmoe()
    with pytest.raises(CetaneError, match=r"config\.json"):
        engine_of(model, recipe(), model.config.to_dict() | {key: value})


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio, layers = (draw(st.integers(1, most)) for most in (3, 4, 3))
    experts, types = draw(st.integers(1, 9)), st.sampled_from([SLIDING, FULL])
    return {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(types, min_size=layers, max_size=layers)),
        "sliding_window": draw(st.integers(1, 40)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 12])),
        "hidden_size": draw(st.integers(4, 64)),
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "attention_bias": draw(st.booleans()),
        "mup_enabled": draw(st.booleans()),
        "num_dense_layers": draw(st.integers(0, 3)),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "num_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.integers(1, 24)),
        "route_scale": draw(st.floats(0.1, 3)),
    }


@settings(max_examples=15, derandomize=True)
@given(configs(), mixture_recipes, st.booleans(), cuts)
def test_anything(config: dict[str, Any], made: Recipe, routed: bool, pieces: list[int]) -> None:
    if routed and config["num_dense_layers"] < config["num_hidden_layers"]:
        made = with_routes(made)
    assert_parity(build_afmoe(**config), made, {"pieces": pieces})
