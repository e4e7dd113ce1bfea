"""GPT-J and CodeGen equal transformers at every position, in every contract."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import recipe, recipes

from cetane.errors import CetaneError
from cetane.families import rotated
from cetane.families.gptj import MODEL_TYPES
from cetane.planner import Planner
from cetane.schema.recipe import Recipe


def build(kind: str, **config: Any) -> Any:
    heads = config.get("num_attention_heads", 4)
    return build_model(kind, **{"rotary_dim": 8, "num_key_value_heads": heads} | config)


@pytest.mark.parametrize(("kind", "contract"), in_turn(MODEL_TYPES))
def test_models(kind: str, contract: str) -> None:
    assert_parity(build(kind), recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("kind", MODEL_TYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True, "n_inner": 40, "activation_function": "gelu"},
        {"num_attention_heads": 8, "rotary_dim": 2},
        {"rotary_dim": 16},
    ],
)
def test_relatives(kind: str, change: dict[str, Any]) -> None:
    assert_parity(build(kind, **change), recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_scaled_residual_stream_is_the_same_model(kind: str) -> None:
    scaled = recipe("readonly", order="ct1", family={"residual_scale": 2**-5})
    assert_parity(build(kind), scaled, {"uneven": FEEDS["uneven"]})


def test_only_values_turn() -> None:
    """A LayerNorm subtracts a mean, which no rotation keeps."""
    checkpoint = InMemoryCheckpoint(build("gptj"))
    turned = rotated(checkpoint, Planner(checkpoint, recipe()).model)
    assert turned.stream is None
    assert all(name.endswith(("v_proj.weight", "out_proj.weight")) for name in turned.folds)


def test_nothing_turns_in_codegen() -> None:
    """One tensor holds queries, keys and values."""
    checkpoint = InMemoryCheckpoint(build("codegen"))
    with pytest.raises(CetaneError, match="nothing of a"):
        rotated(checkpoint, Planner(checkpoint, recipe()).model)


@pytest.mark.parametrize(
    ("kind", "key", "value", "why"),
    [
        ("gptj", "rotary_dim", 7, "rotary_dim = 7, not an even number up to 16"),
        ("gptj", "rotary_dim", 18, "rotary_dim = 18, not an even number up to 16"),
        ("gptj", "rotary_dim", 0, "rotary_dim = 0, not from 1"),
        ("gptj", "n_head", 6, "hidden_size = 64 is not a multiple of 6 heads"),
        ("codegen", "n_head", 2, "2 heads are not a multiple of 4"),
    ],
)
def test_heads_that_no_model_has(kind: str, key: str, value: Any, why: str) -> None:
    model = build(kind)
    config = model.config.to_dict() | {key: value}
    del config["num_key_value_heads"]
    with pytest.raises(CetaneError, match=why):
        engine_of(model, recipe(), config)


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it."""
    kind = draw(st.sampled_from(MODEL_TYPES))
    heads = draw(st.integers(1, 2)) * 4 if kind == "codegen" else draw(st.integers(1, 5))
    pairs = draw(st.integers(1, 6))
    return kind, {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "hidden_size": heads * 2 * pairs,
        "rotary_dim": 2 * draw(st.integers(1, pairs)),
        "n_inner": draw(st.none() | st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "activation_function": draw(st.sampled_from(["gelu_new", "gelu", "relu"])),
    }


@settings(max_examples=20, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], made: Recipe, pieces: list[int]) -> None:
    assert_parity(build(config[0], **config[1]), made, {"pieces": pieces})
