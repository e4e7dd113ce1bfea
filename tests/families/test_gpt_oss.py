"""gpt-oss equals transformers at every position, in every contract, dense and routed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import ROPES
from tests.families.mixture_models import build_oss
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contracts(contract: str) -> None:
    model = build_oss(limit=0.3)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("single", 2)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, order="ct1", routed=DECODE, family=family)
    assert_parity(build_oss(), routed, {"uneven": FEEDS["uneven"]}, drafts=True)


def test_an_activation_that_it_ignores() -> None:
    assert_parity(build_oss(hidden_act="tanh"), recipe(), {"uneven": FEEDS["uneven"]})


def test_layers_of_another_type() -> None:
    model = build_oss()
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(CetaneError, match="chunked_attention"):
        engine_of(model, recipe())


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    types = st.sampled_from(["sliding_attention", "full_attention"])
    return {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(types, min_size=layers, max_size=layers)),
        "sliding_window": draw(st.integers(1, 40)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 12])),
        "hidden_size": draw(st.integers(8, 48)),
        "intermediate_size": draw(st.integers(1, 30)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "limit": draw(st.sampled_from([0.2, 7.0])),
        "rope_parameters": draw(
            st.sampled_from([ROPES["default"], ROPES["yarn"] | {"truncate": False}])
        ),
    }


@settings(max_examples=10, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), st.integers(0, 6), cuts)
def test_anything(config: dict[str, Any], contract: str, together: int, pieces: list[int]) -> None:
    """`together` is the number of experts of a function; 0 for a dense graph."""
    made = recipe(
        contract,
        "per-layer",
        routed=DECODE if together else (),
        family={"together": max(together, 1)},
    )
    assert_parity(build_oss(**config), made, {"pieces": pieces})
