"""LFM2 equals transformers at every position: convolutions keep columns, attention keeps keys. So
does LFM2-MoE, dense and routed."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.test_llama import recipe, recipes
from tests.families.test_mixtral import DECODE, build
from tests.families.test_mixtral import recipes as mixture_recipes
from tests.families.zaya_models import recipe as mixture_recipe
from transformers import AutoConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from cetane.families.axes import Axes
from cetane.families.experts import Correction, Mixture
from cetane.families.lfm2 import ADDED
from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

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
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_dense_layers": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "one layer attends": MODELS["one layer attends"] | EXPERTS,
    "shares of no sum, with a factor": {
        **MODELS["biases, four taps"],
        **EXPERTS,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "no biases of experts": MODELS["one tap"] | EXPERTS | {"use_expert_bias": False},
    "no dense layer": MODELS["one tap"] | EXPERTS | {"num_dense_layers": 0},
    "no experts": MODELS["one tap"] | EXPERTS | {"num_dense_layers": 4},
}


@torch.no_grad()
def build_lfm2_moe(**config: Any) -> Any:
    """A random model whose experts are not compared by their weights alone."""
    model = build("lfm2_moe", **EXPERTS | config)
    for name, biases in model.named_buffers():
        if name.endswith("expert_bias"):
            biases.normal_(std=0.3)
    return model


@pytest.mark.parametrize(("name", "contract"), product(MODELS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    model = build_model("lfm2", **MODELS[name])
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    scaled = recipe("readonly", "chunks").model_copy(update={"family": {"residual_scale": 2**-5}})
    assert_parity(build_model("lfm2", **MODELS[name]), scaled, {"uneven": FEEDS["uneven"]})


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


@pytest.mark.parametrize(("name", "contract"), product(MIXTURES, CONTRACTS))
def test_mixtures(name: str, contract: str) -> None:
    made = mixture_recipe(contract, "chunks", slices=3)
    assert_parity(build_lfm2_moe(**MIXTURES[name]), made, FEEDS, drafts=True)


@pytest.mark.parametrize(("kind", "together"), [("per-block", 1), ("single", 4)])
def test_routed_experts_are_the_same_model(kind: str, together: int) -> None:
    family = {"together": together, "residual_scale": 2**-5}
    routed = mixture_recipe("readonly", kind, routed=DECODE, family=family)
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
@given(mixture_configs(), mixture_recipes(), st.booleans(), cuts)
def test_any_mixture(config: dict[str, Any], made: Recipe, routed: bool, pieces: list[int]) -> None:
    model = build_lfm2_moe(**config)
    if routed and any("experts" in name for name in model.state_dict()):
        made = made.model_copy(update={"layout": made.layout.model_copy(update={"routed": DECODE})})
    assert_parity(model, made, {"pieces": pieces})
