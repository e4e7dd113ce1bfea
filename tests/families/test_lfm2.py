"""LFM2 equals transformers at every position: convolutions keep columns, attention keeps keys. So
do LFM3, and LFM2-MoE, dense and routed."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.mixture_models import LFM2_EXPERTS, build_lfm2_moe
from tests.families.parity import FEEDS, assert_parity, cuts, in_turn
from tests.families.recipes import DECODE, mixture_recipes, recipe, recipes, with_routes
from transformers import AutoConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from cetane.families.axes import Axes
from cetane.families.experts import Correction, Mixture
from cetane.families.lfm2 import ADDED
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, parse_recipe

MODELS: dict[str, dict[str, Any]] = {
    "one layer attends": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "biases, four taps": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "one tap": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 1,
    },
    "no convolution": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
SLIDING = ["conv", "full_attention", "sliding_attention", "conv"]
LATER: dict[str, dict[str, Any]] = {
    "layers that slide": {"num_hidden_layers": 4, "layer_types": SLIDING, "sliding_window": 7},
    "no norms after, no gates": {
        "num_hidden_layers": 4,
        "layer_types": SLIDING,
        "sliding_window": 7,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
    },
    "biases, one tap": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "sliding_attention"],
        "sliding_window": 7,
        "conv_L_cache": 1,
        "conv_bias": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
"""LFM3."""
MIXTURES: dict[str, dict[str, Any]] = {
    "one layer attends": MODELS["one layer attends"] | LFM2_EXPERTS,
    "shares of no sum, with a factor": {
        **MODELS["biases, four taps"],
        **LFM2_EXPERTS,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "no biases of experts": MODELS["one tap"] | LFM2_EXPERTS | {"use_expert_bias": False},
    "no dense layer": MODELS["one tap"] | LFM2_EXPERTS | {"num_dense_layers": 0},
    "no experts": MODELS["one tap"] | LFM2_EXPERTS | {"num_dense_layers": 4},
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    model = build_model("lfm2", **MODELS[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize(("name", "contract"), in_turn(LATER))
def test_lfm3(name: str, contract: str) -> None:
    model = build_model("lfm3", **LATER[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "name"), [*product(["lfm2"], MODELS), *product(["lfm3"], LATER)])
def test_a_smaller_residual_stream_is_the_same_model(kind: str, name: str) -> None:
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    model = build_model(kind, **(MODELS | LATER)[name])
    assert_parity(model, scaled, {"uneven": FEEDS["uneven"]})


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 4))
    types = st.sampled_from(["conv", "full_attention"])
    kinds = draw(st.lists(types, min_size=layers, max_size=layers))
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"],
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.integers(2, 80)),
        "block_multiple_of": draw(st.sampled_from([4, 16])),
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "vocab_size": draw(st.integers(10, 300)),
        "conv_bias": draw(st.booleans()),
        "conv_L_cache": draw(st.integers(1, 5)),
        "tie_word_embeddings": draw(st.booleans()),
    }


def test_gates_of_heads_stay_in_fp16() -> None:
    """They have fewer rows than the groups of a palette."""
    checkpoint = InMemoryCheckpoint(build_model("lfm3", **LATER["layers that slide"]))
    made = {"cache": {"context": 64}, "compression": {"default": "palette6-kmeans-group32"}}
    plan = Planner(checkpoint, parse_recipe({"name": "test"} | made, "test")).plan()
    assert plan.weight_bytes


@st.composite
def later_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Of an LFM3."""
    config = draw(configs())
    types = st.sampled_from(["conv", "full_attention", "sliding_attention"])
    layers = config["num_hidden_layers"]
    rope = {"rope_type": "proportional", "rope_theta": 1e4}
    rope["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5, 1.0]))
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e2, 1e4]))}
    return {name: value for name, value in config.items() if not name.startswith("block")} | {
        "layer_types": [*draw(st.lists(types, min_size=layers - 1, max_size=layers - 1)),
                        draw(st.sampled_from(["full_attention", "sliding_attention"]))],
        "head_dim": draw(st.sampled_from([8, 16])),
        "sliding_window": draw(st.integers(1, 40)),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "use_sandwich_norm": draw(st.booleans()),
        "use_attention_gate": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
    }  # fmt: skip


@settings(max_examples=15, derandomize=True)
@given(later_configs(), recipes, cuts)
def test_any_lfm3(config: dict[str, Any], recipe: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model("lfm3", **config), recipe, {"pieces": pieces})


@pytest.mark.parametrize(("name", "contract"), in_turn(MIXTURES))
def test_mixtures(name: str, contract: str) -> None:
    made = recipe(contract, "chunks", slices=3)
    assert_parity(build_lfm2_moe(**MIXTURES[name]), made, FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("single", 4)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, routed=DECODE, family=family)
    feeds = {name: FEEDS[name] for name in ("steps of 4", "uneven")}
    model = build_lfm2_moe(**MIXTURES["shares of no sum, with a factor"])
    assert_parity(model, routed, feeds, drafts=True)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_weights_of_experts(normalised: bool, biased: bool) -> None:
    """Those of transformers' router, which adds something to sums: weights may be as small."""
    config = AutoConfig.for_model(
        "lfm2_moe", num_hidden_layers=1, layer_types=["conv"], hidden_size=6, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=normalised, use_expert_bias=biased,
    )  # fmt: skip
    router = Lfm2MoeTopKRouter(config)
    router.weight.data = torch.eye(6)  # so that its inputs are logits
    logits = torch.tensor([[0.0, 1, 1.5, -2, 1.2, 0.5], [-15, -14, -16, -13, -17, -14.5]])
    correction = Correction(6)
    correction.numbers.data = torch.tensor([0.5, 0, -0.4, 0.2, -0.1, 0]).reshape(6, 1, 1)
    mixture = Mixture(6, 1, 6, 2, normalised, "silu", 1, sigmoid=True, added=ADDED)
    columns = logits.T.reshape(1, 6, 1, 2)
    found = mixture.weigh(columns, Axes(), correction if biased else None)[0, :, 0].T
    _, weights, chosen = router(logits, correction.numbers.data.flatten())
    torch.testing.assert_close(found, torch.zeros(2, 6).scatter(1, chosen, weights))


@settings(max_examples=15, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: dict[str, Any], recipe: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model("lfm2", **config), recipe, {"pieces": pieces})


@st.composite
def mixture_configs(draw: st.DrawFn) -> dict[str, Any]:
    config = draw(configs())
    count = draw(st.integers(1, 9))
    return {name: value for name, value in config.items() if not name.startswith("block")} | {
        "num_dense_layers": draw(st.integers(0, 2)),
        "num_experts": count,
        "num_experts_per_tok": draw(st.integers(1, count)),
        "moe_intermediate_size": draw(st.integers(1, 24)),
        "use_expert_bias": draw(st.booleans()),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.floats(0.5, 3)),
    }


@settings(max_examples=12, derandomize=True)
@given(mixture_configs(), mixture_recipes, st.booleans(), cuts)
def test_any_mixture(config: dict[str, Any], made: Recipe, routed: bool, pieces: list[int]) -> None:
    model = build_lfm2_moe(**config)
    if routed and any("experts" in name for name in model.state_dict()):
        made = with_routes(made)
    assert_parity(model, made, {"pieces": pieces})
