"""Mixtral and its relatives equal transformers at every position, dense and routed."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import MULTIPLIERS, OWN_ROPES, ROPES, STRETCHED
from tests.families.mixture_models import MIXTURES, build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import DECODE, mixture_recipes, recipe, with_routes

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.experts import Mixture
from cetane.schema.recipe import Recipe

COUNTS = {
    "dots1": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "glm4_moe": "n_routed_experts",
    "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "mixtral": "num_local_experts",
    "solar_open": "n_routed_experts",
}
"""The key of the number of experts, where it is not `num_experts`."""
IGNORED: dict[str, dict[str, Any]] = {
    "mixtral": {"norm_topk_prob": False, "moe_intermediate_size": 8},
    "olmoe": {"moe_intermediate_size": 8},
}
"""Keys of other model types."""


@pytest.mark.parametrize(("name", "contract"), in_turn(MIXTURES))
def test_models(name: str, contract: str) -> None:
    kind, config = MIXTURES[name]
    model = build_mixture(kind, **config)
    assert_parity(model, recipe(contract, "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_a_model_without_experts(kind: str) -> None:
    model = build_mixture(kind, num_experts=0)
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize("name", IGNORED)
def test_keys_of_other_model_types_are_ignored(name: str) -> None:
    kind, config = MIXTURES[name]
    model = build_mixture(kind, **config | IGNORED[name])
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize(
    ("name", "kind", "together"),
    [
        ("dots1", "per-block", 3),
        ("ernie4_5_moe", "per-layer", 2),
        ("exaone_moe", "per-block", 2),
        ("glm4_moe", "per-block", 1),
        ("granitemoe", "per-layer", 2),
        ("granitemoeshared", "chunks", 2),
        ("hunyuan_v1_moe", "per-block", 1),
        ("hy_v3", "per-block", 4),
        ("mellum", "per-layer", 2),
        ("minimax_m2", "per-layer", 2),
        ("mixtral", "per-block", 1),
        ("olmoe", "single", 4),
        ("qwen2_moe", "chunks", 2),
        ("qwen3_moe", "chunks", 3),
        ("solar_open", "chunks", 2),
    ],
)
def test_routed_experts_are_the_same_model(name: str, kind: str, together: int) -> None:
    model_type, config = MIXTURES[name]
    family = {"together": together, "residual_scale": 2**-5}
    routed = recipe("readonly", kind, routed=DECODE, family=family)
    feeds = {name: FEEDS[name] for name in ("steps of 4", "uneven")}
    assert_parity(build_mixture(model_type, **config), routed, feeds, drafts=True)


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
    model = build_mixture("mixtral", num_local_experts=4)
    model.config.num_experts_per_tok = chosen
    with pytest.raises(CetaneError, match=r"experts"):
        engine_of(model, recipe())


NARROW, WINDOWS = st.integers(1, 24), st.none() | st.integers(1, 40)
"""The channels of an expert, and windows."""


@st.composite
def grouped(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Groups of experts, of one more than `size` each, and how many experts a token takes."""
    groups = draw(st.integers(1, 3))
    opened = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * (size + 1),
        "n_group": groups,
        "topk_group": opened,
        "num_experts_per_tok": draw(st.integers(1, opened * (size + 1))),
    }


def layer_types(draw: st.DrawFn, layers: int, *types: str) -> list[str]:
    return draw(st.lists(st.sampled_from(types), min_size=layers, max_size=layers))


def deepseek_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return draw(grouped(experts)) | {
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(NARROW),
        "routed_scaling_factor": draw(st.floats(0.1, 3)),
    }


def dots1_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return deepseek_keys(draw, experts, layers) | {
        "sliding_window": draw(WINDOWS),
        "max_window_layers": draw(st.integers(0, 3)),
    }


def ernie_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {
        "moe_layer_start_index": draw(st.integers(0, layers)),
        "moe_layer_end_index": draw(st.integers(-1, layers)),
        "moe_layer_interval": draw(st.integers(1, 3)),
        "moe_num_shared_experts": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(NARROW),
    }


def mellum_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {
        "layer_types": layer_types(draw, layers, "sliding_attention", "full_attention"),
        "mlp_layer_types": layer_types(draw, layers, "dense", "sparse"),
        "sliding_window": draw(st.integers(1, 40)),
        "moe_intermediate_size": draw(NARROW),
        "rope_parameters": OWN_ROPES,
    }


def exaone_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    common, groups = mellum_keys(draw, experts, layers), draw(grouped(experts))
    del common["rope_parameters"]
    return (
        common
        | groups
        | {
            "num_experts": groups["n_routed_experts"],
            "num_shared_experts": draw(st.integers(1, 2)),
            "routed_scaling_factor": draw(st.floats(0.1, 3)),
        }
    )


def glm4_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    part = draw(st.sampled_from([0.5, 1.0]))
    return deepseek_keys(draw, experts, layers) | {
        "use_qk_norm": draw(st.booleans()),
        "rope_parameters": ROPES["default"] | {"partial_rotary_factor": part},
    }


def granite_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {name: draw(st.floats(0.1, 2)) for name in MULTIPLIERS}


def shared_granite_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    shared = draw(st.integers(0, 24))
    return granite_keys(draw, experts, layers) | {"shared_intermediate_size": shared}


def hunyuan_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    several = st.lists(st.integers(1, experts), min_size=layers, max_size=layers + 1)
    ropes = st.sampled_from([ROPES["default"], ROPES["linear"] | STRETCHED])
    return {
        "moe_topk": draw(st.integers(1, experts) | several),
        "rope_parameters": draw(ropes),
    }


def hunyuan_3_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    kinds = st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers)
    return {
        "mlp_layer_types": draw(kinds),
        "moe_intermediate_size": draw(NARROW),
        "num_shared_experts": draw(st.integers(1, 2)),
        "router_scaling_factor": draw(st.floats(0.3, 3)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


def minimax_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    part = draw(st.sampled_from([0.5, 1.0]))
    return {"rope_parameters": ROPES["default"] | {"partial_rotary_factor": part}}


def mixtral_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {"sliding_window": draw(WINDOWS)}


def olmoe_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {"clip_qkv": draw(st.none() | st.floats(0.1, 2))}


def qwen3_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return {
        "moe_intermediate_size": draw(NARROW),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "use_sliding_window": True,
        "sliding_window": draw(WINDOWS),
        "head_dim": draw(st.sampled_from([8, 16])),
    }


def qwen2_keys(draw: st.DrawFn, experts: int, layers: int) -> dict[str, Any]:
    return qwen3_keys(draw, experts, layers) | {
        "qkv_bias": draw(st.booleans()),
        "shared_expert_intermediate_size": draw(NARROW),
        "sliding_window": draw(st.integers(1, 40)),
        "max_window_layers": draw(st.integers(0, 3)),
    }


OWN_KEYS: dict[str, Callable[[st.DrawFn, int, int], dict[str, Any]]] = {
    "dots1": dots1_keys, "ernie4_5_moe": ernie_keys, "exaone_moe": exaone_keys,
    "glm4_moe": glm4_keys, "granitemoe": granite_keys, "granitemoeshared": shared_granite_keys,
    "hunyuan_v1_moe": hunyuan_keys, "hy_v3": hunyuan_3_keys, "mellum": mellum_keys,
    "minimax_m2": minimax_keys, "mixtral": mixtral_keys,
    "olmoe": olmoe_keys, "qwen2_moe": qwen2_keys, "qwen3_moe": qwen3_keys,
    "solar_open": deepseek_keys,
}  # fmt: skip
"""What each model type's config has of its own, for a number of experts and of layers."""


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(sorted(MIXTURES)))
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
        COUNTS.get(kind, "num_experts"): experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
    }
    if kind != "mixtral":
        config |= {"norm_topk_prob": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    return kind, config | OWN_KEYS[kind](draw, experts, layers)


@settings(max_examples=20, derandomize=True)
@given(configs(), mixture_recipes, st.booleans(), cuts)
def test_anything(
    config: tuple[str, dict[str, Any]], made: Recipe, routed: bool, pieces: list[int]
) -> None:
    model = build_mixture(config[0], **config[1])
    if routed and any("experts" in name for name in model.state_dict()):
        made = with_routes(made)
    assert_parity(model, made, {"pieces": pieces})
