"""Granite with windows equals transformers at every position, in every contract; with experts
also routed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.config_parts import MULTIPLIERS, ROPES
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.planner import Planner
from cetane.schema.slots import CONTRACTS

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = MULTIPLIERS | {
    "num_hidden_layers": 4,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 7,
}
BASES = {"layer_rope_theta": [0, 100.0, 5e3, 100.0]}
"""A layer without positions, and others with two bases."""
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one base": ("granite_swa", {}),
    "biases, bases": ("granite_swa", BASES | {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("granite_swa", BASES | {"rope_parameters": ROPES["yarn"]}),
    "no positions": ("granite_swa", {"layer_rope_theta": [0] * 4}),
    "experts": ("granitemoe_swa", EXPERTS | BASES),
    "a shared expert": ("granitemoe_swa", EXPERTS | {"shared_intermediate_size": 28}),
}


def build(name: str) -> Any:
    kind, config = MODELS[name]
    return build_mixture(kind, **WINDOWED | config)


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    assert_parity(build(name), recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


def test_routed_experts_are_the_same_model() -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order="ct1", routed=DECODE, family=family)
    assert_parity(build("experts"), routed, {"uneven": FEEDS["uneven"]}, drafts=True)


def test_layers_that_slide_keep_no_more_than_a_window() -> None:
    planner = Planner(InMemoryCheckpoint(build("one base")), recipe())
    groups = {name: group.window for name, group in planner.model.memory.items()}
    assert groups == {"full": None, "sliding": 7}


def test_layers_without_a_base() -> None:
    model = build("one base")
    model.config.layer_rope_theta = [1e4, 1e4]
    with pytest.raises(CetaneError, match="layer_rope_theta has 2 entries, num_hidden_layers = 4"):
        engine_of(model, recipe())


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it."""
    kind = draw(st.sampled_from(["granite_swa", "granitemoe_swa"]))
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    types, bases = st.sampled_from([SLIDING, FULL]), st.sampled_from([0, 100.0, 1e4])
    factors = {name: draw(st.floats(0.5, 4)) for name in MULTIPLIERS}
    config: dict[str, Any] = factors | {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(types, min_size=layers, max_size=layers)),
        "layer_rope_theta": draw(st.lists(bases, min_size=layers, max_size=layers)),
        "sliding_window": draw(st.integers(1, 40)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 30)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(list(ROPES.values()))),
    }
    if kind == "granite_swa":
        return kind, config | {"mlp_bias": draw(st.booleans())}
    return kind, config | {
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "shared_intermediate_size": draw(st.sampled_from([0, 5])),
    }


@settings(max_examples=20, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: tuple[str, dict[str, Any]], contract: str, pieces: list[int]) -> None:
    made = recipe(contract, "per-layer", slices=2)
    assert_parity(build_mixture(config[0], **config[1]), made, {"pieces": pieces})
