"""Mamba-2 alone equals transformers at every position: matrices and histories, no caches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.matrix_models import LIMITS, build_mamba2
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import recipe

from cetane.errors import CetaneError
from cetane.planner import Planner

UNEVEN = {"uneven": FEEDS["uneven"]}


def test_models() -> None:
    assert_parity(build_mamba2(), recipe("readonly", "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        {"expand": 1, "head_dim": 8, "n_groups": 4, "conv_kernel": 1},
        {"n_groups": 1, "time_step_limit": (0.9, 1.4), "hidden_act": "gelu"},
        {"num_heads": 3, "head_dim": 5, "hidden_size": 15, "expand": 1, "n_groups": 3},
    ],
)
def test_relatives(change: dict[str, Any]) -> None:
    assert_parity(build_mamba2(**change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_scaled_residual_stream_is_the_same_model(order: str) -> None:
    scaled = recipe("blend", "per-block", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_mamba2(), scaled, UNEVEN, drafts=True)


def test_a_context_costs_no_memory() -> None:
    planner = Planner(InMemoryCheckpoint(build_mamba2()), recipe())
    assert planner.plan().caches == {}
    assert planner.model.max_context == 2**20


def test_groups_that_do_not_divide_the_heads() -> None:
    model = build_mamba2()
    model.config.n_groups = 3
    with pytest.raises(CetaneError, match="8 heads of Mamba-2 are not a multiple of 3 groups"):
        engine_of(model, recipe())


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    groups, expand = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, dim = groups * draw(st.integers(1, 2)), draw(st.sampled_from([6, 8]))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_heads": heads * expand,
        "head_dim": dim,
        "hidden_size": heads * dim,
        "expand": expand,
        "n_groups": groups,
        "state_size": draw(st.integers(2, 12)),
        "conv_kernel": draw(st.integers(1, 5)),
        "use_bias": draw(st.booleans()),
        "use_conv_bias": draw(st.booleans()),
        "time_step_limit": draw(LIMITS),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=8, derandomize=True)
@given(configs(), cuts)
def test_anything(config: dict[str, Any], pieces: list[int]) -> None:
    assert_parity(build_mamba2(**config), recipe(kind="per-layer"), {"pieces": pieces})
