"""Mixtral and its relatives equal transformers at every position, dense and routed."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.test_llama import MULTIPLIERS
from tests.families.zaya_models import recipe

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.experts import Mixture
from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

DECODE = ("decode", "verify")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 3} | MULTIPLIERS),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.5}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 28,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}


LOCAL = ("granitemoe", "mixtral")
"""The model types whose number of experts has another key."""
IGNORED: dict[str, dict[str, Any]] = {
    "mixtral": {"norm_topk_prob": False, "moe_intermediate_size": 8},
    "olmoe": {"moe_intermediate_size": 8},
}
"""Keys of other model types."""


def build(kind: str, **config: Any) -> Any:
    model = build_model(kind, **config)
    model.config._experts_implementation = "eager"  # the plainest arithmetic
    return model


@pytest.mark.parametrize(("name", "contract"), product(MODELS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    kind, config = MODELS[name]
    model = build(kind, **config)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_a_model_without_experts(kind: str) -> None:
    model = build(kind, num_experts=0)
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize("name", IGNORED)
def test_keys_of_other_model_types_are_ignored(name: str) -> None:
    kind, config = MODELS[name]
    model = build(kind, **config | IGNORED[name])
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize(
    ("name", "kind", "together"),
    [
        ("granitemoe", "per-layer", 2),
        ("mixtral", "per-block", 1),
        ("olmoe", "single", 4),
        ("qwen2_moe", "chunks", 2),
        ("qwen3_moe", "chunks", 3),
    ],
)
def test_routed_experts_are_the_same_model(name: str, kind: str, together: int) -> None:
    model_type, config = MODELS[name]
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, routed=DECODE, family=family)
    feeds = {name: FEEDS[name] for name in ("steps of 4", "uneven")}
    assert_parity(build(model_type, **config), routed, feeds, drafts=True)


def test_the_weights_are_those_of_topk() -> None:
    """Of equal logits the first expert is taken, and never more experts than asked for."""
    logits = torch.tensor([[0.0, 1, 1, -2, 1, 0.5], [3, 3, 3, 3, 3, 3], [-9, 9, 0, 0, 0, 1]]).T
    for chosen, normalised in product((1, 3, 6), (True, False)):
        mixture = Mixture(1, 1, 6, chosen, normalised, "silu", 1)
        weights = mixture.weigh(logits.reshape(1, 6, 1, 3), Axes())[0, :, 0]
        probabilities = torch.softmax(logits, 0)
        for column in range(3):
            order = sorted(range(6), key=lambda e: (-float(logits[e, column]), e))[:chosen]
            expected = torch.zeros(6)
            expected[order] = probabilities[order, column]
            if normalised:
                expected /= expected.sum()
            torch.testing.assert_close(weights[:, column], expected)


@pytest.mark.parametrize("chosen", [0, 5])
def test_a_token_cannot_take_more_experts_than_there_are(chosen: int) -> None:
    model = build("mixtral", num_local_experts=4)
    model.config.num_experts_per_tok = chosen
    with pytest.raises(CetaneError, match=r"experts"):
        engine_of(model, recipe())


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(sorted(MODELS)))
    experts, layers = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    dim = draw(st.sampled_from([8, 12]))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * dim,
        "head_dim": dim,
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "num_local_experts" if kind in LOCAL else "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
    }
    if kind in ("mixtral", "qwen3_moe"):
        config["sliding_window"] = draw(st.none() | st.integers(1, 40))
    if kind == "olmoe":
        config["clip_qkv"] = draw(st.none() | st.floats(0.1, 2))
    if kind == "granitemoe":
        config |= {name: draw(st.floats(0.1, 2)) for name in MULTIPLIERS}
    if kind != "mixtral":
        config |= {"norm_topk_prob": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    if kind in ("qwen2_moe", "qwen3_moe"):
        config |= {
            "moe_intermediate_size": draw(st.integers(1, 24)),
            "decoder_sparse_step": draw(st.integers(1, 2)),
            "use_sliding_window": True,
            "head_dim": draw(st.sampled_from([8, 16])),
        }
    if kind == "qwen2_moe":
        config |= {
            "qkv_bias": draw(st.booleans()),
            "shared_expert_intermediate_size": draw(st.integers(1, 24)),
            "sliding_window": draw(st.integers(1, 40)),
            "max_window_layers": draw(st.integers(0, 3)),
        }
    return kind, config


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    return recipe(
        draw(st.sampled_from(CONTRACTS)),
        draw(st.sampled_from(["per-block", "per-layer", "single"])),
        order=draw(st.sampled_from(["c1t", "ct1"])),
        slices=draw(st.integers(1, 3)),
        family={"together": draw(st.integers(1, 9))},
    )


@settings(max_examples=20, derandomize=True)
@given(configs(), recipes(), st.booleans(), cuts)
def test_anything(
    config: tuple[str, dict[str, Any]], made: Recipe, routed: bool, pieces: list[int]
) -> None:
    model = build(config[0], **config[1])
    if routed and any("experts" in name for name in model.state_dict()):
        made = made.model_copy(update={"layout": made.layout.model_copy(update={"routed": DECODE})})
    assert_parity(model, made, {"pieces": pieces})
