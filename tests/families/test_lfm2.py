"""LFM2 equals transformers at every position: convolutions keep columns, attention keeps keys."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.test_llama import recipe, recipes

from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

MODELS: dict[str, dict[str, Any]] = {
    "one layer attends": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "biases, four taps": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "one tap": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 1,
    },
    "no convolution": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}


@pytest.mark.parametrize(("name", "contract"), product(MODELS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    model = build_model("lfm2", **MODELS[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    scaled = recipe("readonly", "chunks").model_copy(update={"family": {"residual_scale": 2**-5}})
    assert_parity(build_model("lfm2", **MODELS[name]), scaled, {"uneven": FEEDS["uneven"]})


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 4))
    types = st.sampled_from(["conv", "full_attention"])
    kinds = draw(st.lists(types, min_size=layers, max_size=layers))
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"],
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(2, 80)),
        "block_multiple_of": draw(st.sampled_from([4, 16])),
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "vocab_size": draw(st.integers(10, 300)),
        "conv_bias": draw(st.booleans()),
        "conv_L_cache": draw(st.integers(1, 5)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=15, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: dict[str, Any], recipe: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model("lfm2", **config), recipe, {"pieces": pieces})
