"""Both GLM-4s equal transformers at every position, in every contract."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.config_parts import ROPES
from tests.families.parity import FEEDS, assert_parity, cuts, in_turn
from tests.families.recipes import recipe, recipes

from cetane.schema.recipe import Recipe

TYPES = "glm", "glm4"
WHOLE = ROPES["default"] | {"partial_rotary_factor": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    kind + said: (kind, config)
    for kind, (said, config) in product(
        TYPES,
        {
            "": {},
            ", heads turned whole": {"rope_parameters": WHOLE, "tie_word_embeddings": True},
            ", no biases, one kv head": {"attention_bias": False, "num_key_value_heads": 1},
        }.items(),
    )
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    kind, config = MODELS[name]
    assert_parity(build_model(kind, **config), recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize("kind", TYPES)
def test_a_smaller_residual_stream_is_the_same_model(kind: str) -> None:
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    assert_parity(build_model(kind), scaled, {"uneven": FEEDS["uneven"]})


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it."""
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    config: dict[str, Any] = {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([4, 8, 12, 16])),
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "rope_parameters": ROPES["default"]
        | {"partial_rotary_factor": draw(st.sampled_from([0.5, 1.0]))},
    }
    return draw(st.sampled_from(TYPES)), config


@settings(max_examples=15, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], made: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model(config[0], **config[1]), made, {"pieces": pieces})
