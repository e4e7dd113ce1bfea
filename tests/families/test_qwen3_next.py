"""Qwen3-Next and Qwen3.5 equal transformers at every position: matrices, histories and caches."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.matrix_models import DELTA_LAYERS, QWEN_NEXT
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.families.delta import RAISED_ANSWERS, TINY, DeltaNet
from cetane.families.layers import normalize
from cetane.planner import Planner
from cetane.schema.slots import CONTRACTS


@pytest.mark.parametrize(("kind", "contract"), product(QWEN_NEXT, CONTRACTS))
def test_models(kind: str, contract: str) -> None:
    model = build_mixture(kind, **QWEN_NEXT[kind])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("kind", QWEN_NEXT)
def test_another_activation(kind: str) -> None:
    model = build_mixture(kind, **QWEN_NEXT[kind], hidden_act="gelu")
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


def test_fp16_holds_the_epsilon_of_answers() -> None:
    """As programs keep it. 1e-6 alone would be 1.013e-6, and random answers are no larger than its
    root."""
    planner = Planner(InMemoryCheckpoint(build_mixture("qwen3_5_text", **DELTA_LAYERS)), recipe())
    norms = [m.norm for b in planner.model.layers for m in b.modules() if isinstance(m, DeltaNet)]
    assert len(norms) == 2
    for norm in norms:
        assert np.float16(norm.eps) == pytest.approx(norm.eps, rel=2**-11)


def test_fp16_rounds_a_query_once() -> None:
    """Behind its norm one number brings it to its length. For 8 keys, 8^-0.5 * 8^-0.5 * 32 = 4
    changes no digit."""
    planner = Planner(InMemoryCheckpoint(build_mixture("qwen3_5_text", **DELTA_LAYERS)), recipe())
    net = next(m for b in planner.model.layers for m in b.modules() if isinstance(m, DeltaNet))
    asked = torch.randn(1, 2, 8, 5, generator=torch.Generator().manual_seed(0)).half()
    normed = normalize(asked, 8, TINY / 8, axis=2)
    assert torch.equal(net.unit(asked, 8**-0.5 * RAISED_ANSWERS), normed * 4)


def test_a_model_without_experts() -> None:
    model = build_mixture("qwen3_next", **DELTA_LAYERS, num_experts=0)
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


def test_a_key_that_qwen3_5_ignores() -> None:
    model = build_mixture("qwen3_5_moe_text", **QWEN_NEXT["qwen3_5_moe_text"], norm_topk_prob=False)
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_routed_experts_are_the_same_model(order: str) -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order=order, routed=DECODE, family=family)
    model = build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"])
    assert_parity(model, routed, {"uneven": FEEDS["uneven"]}, drafts=True)


def test_a_mark_is_a_return() -> None:
    engine = engine_of(build_mixture("qwen3_5_text", **DELTA_LAYERS), recipe())
    session = engine.session()
    session.feed([1, 2, 3])
    mark = session.mark()
    first = session.feed([4, 5, 6, 7, 8], "all")
    session.rewind(mark)
    assert (session.feed([4, 5, 6, 7, 8], "all") == first).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "not a multiple"),
        ({"model_type": "qwen3_5_moe_text", "num_experts": 0}, "num_experts = 0"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "layer_types: 'sliding",
        ),
    ],
)
def test_configs_that_no_model_has(change: dict[str, Any], message: str) -> None:
    model = build_mixture("qwen3_5_text", **DELTA_LAYERS)
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


def test_flexible_shapes_are_refused() -> None:
    with pytest.raises(CetaneError, match="matrices"):
        engine_of(build_mixture("qwen3_5_text", **DELTA_LAYERS), recipe(shapes="range"))


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(sorted(QWEN_NEXT)))
    kv, layers = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    types = st.sampled_from(["linear_attention", "full_attention"])
    keys, experts = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(types, min_size=layers, max_size=layers)),
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([8, 16, 24])),
        "hidden_size": draw(st.integers(12, 48)),
        "intermediate_size": draw(st.integers(2, 60)),
        "vocab_size": draw(st.integers(10, 300)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(2, 12)),
        "linear_value_head_dim": draw(st.integers(2, 12)),
        "linear_conv_kernel_dim": draw(st.integers(1, 5)),
    }
    if kind != "qwen3_5_text":
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(st.integers(1, 20)),
            "shared_expert_intermediate_size": draw(st.integers(1, 20)),
        }
    return kind, config


@settings(max_examples=12, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: tuple[str, dict[str, Any]], contract: str, pieces: list[int]) -> None:
    if "full_attention" not in config[1]["layer_types"]:
        config[1]["layer_types"][-1] = "full_attention"
    assert_parity(
        build_mixture(config[0], **config[1]), recipe(contract, "per-layer"), {"pieces": pieces}
    )
