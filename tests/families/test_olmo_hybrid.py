"""OLMo Hybrid equals transformers at every position: matrices, histories and caches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.config_parts import ROPES
from tests.families.matrix_models import OLMO_HYBRID, build_olmo_hybrid
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import recipe

from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_models(contract: str) -> None:
    model = build_olmo_hybrid()
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": ROPES["default"]},
        {"rope_parameters": ROPES["yarn"], "num_key_value_heads": 1},
        {"linear_allow_neg_eigval": False, "attention_bias": True},
        {"linear_conv_kernel_dim": 1, "hidden_act": "gelu"},
        {"rms_norm_eps": 0.1, "tie_word_embeddings": True},
        {"linear_num_value_heads": 2, "num_hidden_layers": 5, "layer_types": None},
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_olmo_hybrid(**change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_scaled_residual_stream_is_the_same_model(order: str) -> None:
    scaled = recipe("readonly", "per-block", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_olmo_hybrid(), scaled, UNEVEN, drafts=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_num_value_heads", 3),
        ("linear_key_head_dim", 0),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", ["linear_attention", "full_attention", "sliding_attention"]),
    ],
)
def test_configs_that_no_model_has(key: str, value: Any) -> None:
    model = build_olmo_hybrid()
    with pytest.raises(CetaneError, match=r"config\.json"):
        engine_of(model, recipe(), model.config.to_dict() | {key: value})


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    keys, types = draw(st.integers(1, 3)), ["linear_attention", "full_attention"]
    more = draw(st.lists(st.sampled_from(types), max_size=2))
    layers = draw(st.permutations([*types, *more]))
    return {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "attention_bias": draw(st.booleans()),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(1, 12)),
        "linear_value_head_dim": draw(st.integers(1, 12)),
        "linear_conv_kernel_dim": draw(st.integers(1, 5)),
        "linear_allow_neg_eigval": draw(st.booleans()),
        "rope_parameters": draw(
            st.sampled_from([OLMO_HYBRID["rope_parameters"], ROPES["default"]])
        ),
    }


@settings(max_examples=12, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(build_model("olmo_hybrid", **config), recipe(contract), {"pieces": pieces})
