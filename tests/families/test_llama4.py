"""Llama 4 equals transformers at every position, dense and routed, up to the end of its context."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.config_parts import ROPES
from tests.families.mixture_models import build_llama4
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.experts import Mixture
from cetane.planner import Planner
from cetane.schema.slots import CONTRACTS


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contracts(contract: str) -> None:
    assert_parity(build_llama4(), recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("normed", [True, False])
def test_a_factor_on_rotary_tables(normed: bool) -> None:
    """The norm of queries and keys comes after their turn, and takes the factor away."""
    rope = ROPES["yarn"] | {"attention_factor": 2.0}
    model = build_llama4(use_qk_norm=normed, rope_parameters=rope)
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("single", 3)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, order="ct1", routed=DECODE, family=family)
    model = build_llama4(num_experts_per_tok=2)
    assert_parity(model, routed, {"uneven": FEEDS["uneven"]}, drafts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_choice_among_logits_far_apart(dtype: torch.dtype) -> None:
    """In shares of all, every logit but the largest would be zero, and the first of them chosen."""
    logits = torch.tensor([200.0, -300.0, 3.0, 7.0, -250.0, 5.0], dtype=dtype)
    mixture = Mixture(1, 1, 6, 3, normalised=False, act="silu", together=1, sigmoid=True)
    weights = mixture.weigh(logits.reshape(1, 6, 1, 1), Axes()).flatten()
    best = torch.topk(logits, 3)
    expected = torch.full_like(logits, float("-inf")).scatter(0, best.indices, best.values)
    torch.testing.assert_close(weights, torch.sigmoid(expected))


def test_a_port_ends_where_chunks_or_late_queries_begin() -> None:
    def longest(**config: Any) -> int:
        return Planner(InMemoryCheckpoint(build_llama4(**config)), recipe()).model.max_context

    assert longest(attention_chunk_size=40, floor_scale=100) == 40
    assert longest(attention_chunk_size=100, floor_scale=50) == 49
    whole = {"layer_types": ["full_attention"] * 3, "attention_chunk_size": None}
    assert longest(no_rope_layers=[1, 1, 1], **whole) == 256
    assert longest(attn_temperature_tuning=False, **whole) == 256


def test_a_factor_on_all_queries_is_refused() -> None:
    with pytest.raises(CetaneError, match="floor_scale = 1"):
        engine_of(build_llama4(floor_scale=1), recipe())


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rope = draw(st.sampled_from(list(ROPES.values())))
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 6, 8, 12, 16])),
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(1, 40)),
        "intermediate_size_mlp": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(10, 200)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "attn_temperature_tuning": draw(st.booleans()),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_layers": [index for index in range(layers) if draw(st.booleans())],
        "no_rope_layers": [draw(st.sampled_from([0, 1])) for _ in range(layers)],
        "rope_parameters": rope | {"rope_theta": draw(st.sampled_from([100.0, 1e4]))},
    }


@settings(max_examples=8, derandomize=True)
@given(configs(), st.sampled_from(list(CONTRACTS)), cuts)
def test_anything(config: dict[str, Any], contract: str, pieces: list[int]) -> None:
    assert_parity(build_llama4(**config), recipe(contract), {"pieces": pieces})
