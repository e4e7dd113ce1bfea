"""Falcon-H1 equals transformers at every position: two mixers in a layer, and multipliers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.matrix_models import FALCON, LIMITS, build_falcon
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import recipe

from cetane.errors import CetaneError
from cetane.schema.slots import CONTRACTS

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_models(contract: str) -> None:
    model = build_falcon(mamba_n_groups=2)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_rms_norm": True, "mamba_n_groups": 2},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {"mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False},
        {"attention_bias": True, "mlp_bias": True, "mamba_d_conv": 1},
        {"mamba_d_ssm": None, "hidden_act": "gelu", "tie_word_embeddings": True},
        {"time_step_limit": (0.0, 1.2)},
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_falcon(**change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_scaled_residual_stream_is_the_same_model(order: str) -> None:
    scaled = recipe("readonly", "per-block", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_falcon(), scaled, UNEVEN, drafts=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers has 4 entries, not 5"),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 entries, not 2"),
        ({"mamba_n_groups": 3}, "not a multiple of 3"),
        ({"time_step_limit": [0.0, 0.0]}, "bounds of steps from 0.0 to 0.0"),
    ],
)
def test_configs_that_no_port_has(change: dict[str, Any], message: str) -> None:
    model = build_falcon()
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv = draw(st.integers(1, 2))
    heads = kv * draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.integers(1, 3))
    values = groups * draw(st.integers(1, 3))
    factors = st.sampled_from([0.5, 0.8, 1.0, 1.7])
    names = [name for name in FALCON if name.endswith("multiplier")]
    return {name: draw(factors) for name in names} | {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": heads * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(2, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "projectors_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "mamba_d_ssm": values * draw(st.integers(2, 8)),
        "mamba_n_heads": values,
        "mamba_n_groups": groups,
        "mamba_d_head": "auto",
        "mamba_d_state": draw(st.integers(2, 12)),
        "mamba_d_conv": draw(st.integers(1, 5)),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "time_step_limit": draw(LIMITS),
        "mamba_rms_norm": draw(st.booleans()),
        "mamba_norm_before_gate": draw(st.booleans()),
        "ssm_multipliers": draw(st.lists(factors, min_size=5, max_size=5)),
        "mlp_multipliers": draw(st.lists(factors, min_size=2, max_size=2)),
    }


@settings(max_examples=8, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(
        build_model("falcon_h1", **config), recipe(contract, "per-layer"), {"pieces": pieces}
    )
