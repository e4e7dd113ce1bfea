"""OLMo 2, OLMo 3 and EXAONE 4 equal transformers at every position, in every contract."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.config_parts import OWN_ROPES, ROPES
from tests.families.parity import FEEDS, assert_parity, cuts, in_turn
from tests.families.recipes import recipe, recipes

from cetane.schema.recipe import Recipe

PARTIAL_ROPES = {
    name: ROPES["default"] | {"partial_rotary_factor": 0.5}
    for name in ("sliding_attention", "full_attention")
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "olmo2, bias, one kv head": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 6}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 6}),
    "exaone4, nothing slides": (
        "exaone4",
        {
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
            "rope_parameters": ROPES["llama3"],
        },
    ),
    "exaone4, an unused window": (
        "exaone4",
        {"layer_types": ["full_attention"] * 2, "sliding_window": 6},
    ),
    "olmo3, ropes by type": (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 6, "rope_parameters": OWN_ROPES},
    ),
    "olmo3, a part of heads that it ignores": (
        "olmo3",
        {
            "layer_types": list(PARTIAL_ROPES),
            "sliding_window": 6,
            "rope_parameters": PARTIAL_ROPES,
        },
    ),
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    kind, config = MODELS[name]
    assert_parity(build_model(kind, **config), recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    kind, config = MODELS[name]
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    assert_parity(build_model(kind, **config), scaled, {"uneven": FEEDS["uneven"]})


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 4))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
    }
    kind = draw(st.sampled_from(["exaone4", "olmo2", "olmo3"]))
    if kind != "exaone4":
        config["attention_bias"] = draw(st.booleans())
    if kind != "olmo2":
        config["sliding_window"] = draw(st.integers(1, 40))
        types = st.sampled_from(["sliding_attention", "full_attention"])
        config["layer_types"] = draw(st.lists(types, min_size=layers, max_size=layers))
    return kind, config


@settings(max_examples=15, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], recipe: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model(config[0], **config[1]), recipe, {"pieces": pieces})
