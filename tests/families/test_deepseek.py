"""DeepSeek and its relatives equal transformers at every position, though no head's key or value is
ever made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families.config_parts import LONGROPE, ROPES
from tests.families.latent_models import (
    DEEPSEEK,
    LATENT_MODELS,
)
from tests.families.mixture_models import build_mixture
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of, in_turn
from tests.families.recipes import DECODE, recipe

from cetane.errors import CetaneError
from cetane.families import Model, unread
from cetane.families import author as author_any
from cetane.families.experts import MixtureBlock
from cetane.schema.slots import CONTRACTS

YARN = ROPES["yarn"] | {"mscale": 0.7, "mscale_all_dim": 0.7}


@pytest.mark.parametrize(("name", "contract"), in_turn(LATENT_MODELS))
def test_models(name: str, contract: str) -> None:
    kind, config = LATENT_MODELS[name]
    made = recipe(contract, "chunks", slices=3)
    assert_parity(build_mixture(kind, **config), made, FEEDS, drafts=True)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_routed_experts_are_the_same_model(kind: str) -> None:
    family = {"together": 2, "residual_scale": 2**-5}
    routed = recipe("readonly", "per-block", order="ct1", routed=DECODE, family=family)
    config = LATENT_MODELS[kind][1] | {"attention_bias": True, "rope_parameters": YARN}
    model = build_mixture(kind, **config | {"q_lora_rank": 16})
    assert_parity(model, routed, {"uneven": FEEDS["uneven"]}, drafts=True)


def test_the_cache_holds_only_latents() -> None:
    engine = engine_of(build_mixture("deepseek_v2", **DEEPSEEK), recipe())
    assert engine.plan.kv_bytes[32] == 2 * 32 * (20 + 8) * DEEPSEEK["num_hidden_layers"]


def test_only_differences_of_corrections_matter() -> None:
    """fp16 is coarse where released ones lie."""
    (block,) = (one for one in author("deepseek_v3").layers if isinstance(one, MixtureBlock))
    ((_, weight),) = ((path, w) for path, w in block.weights() if path.startswith("correction."))
    stored = 40 + torch.rand(12)
    read = weight.read(SimpleNamespace(read=lambda _: stored)).reshape(12)  # type: ignore[arg-type]
    torch.testing.assert_close(read[:, None] - read, stored[:, None] - stored, atol=1e-5, rtol=0)
    assert read.abs().max() < 1


def test_what_lies_behind_the_last_layer_is_not_read() -> None:
    """The layer that predicts one more token of a released DeepSeek-V3."""
    model = build_mixture("deepseek_v3", **LATENT_MODELS["deepseek_v3"][1])
    names = [*model.state_dict(), "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"]
    assert unread(names, author("deepseek_v3")) == names[-2:]


def author(name: str) -> Model:
    """The authored model of one of `MODELS`."""
    kind, config = LATENT_MODELS[name]
    return author_any(build_mixture(kind, **config).config.to_dict(), "c1t", {}, None)  # type: ignore[arg-type]


NO_GROUPS = "no groups of at least two of 5 experts"
TWO_TABLES = LONGROPE | {
    "partial_rotary_factor": 1.0, "short_factor": [1.0, 1.1, 1.5, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip


def test_a_minicpm3_ends_before_its_second_table() -> None:
    kind, config = LATENT_MODELS["minicpm3"]
    model = build_mixture(kind, **config | {"rope_parameters": TWO_TABLES})
    assert_parity(model, recipe(), {"uneven": FEEDS["uneven"]})
    made = author_any(model.config.to_dict(), "c1t", {}, None)  # type: ignore[arg-type]
    assert (made.max_context, made.beyond) == (64, "has other rotary tables")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v2", {"kv_lora_rank": 21}, "odd"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "share a latent"),
        ("moonlight", {"n_group": None}, NO_GROUPS),
        ("moonlight", {"n_group": 0}, "n_group = 0, not from 1"),
        ("moonlight", {"n_group": 2}, NO_GROUPS),
        ("moonlight", {"n_group": 5, "topk_group": 5}, NO_GROUPS),
        ("moonlight", {"topk_group": 2}, NO_GROUPS),
        ("moonlight", {"n_routed_experts": 1, "num_experts_per_tok": 1}, "at least two of 1"),
        ("moonlight", {"num_experts_per_tok": 6}, "takes 6 experts of 1 groups of 5"),
        ("moonlight", {"num_experts_per_tok": None}, "takes None experts"),
        ("moonlight", {"first_k_dense_replace": None}, "deepseek_v3 model is not valid"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "takes 7 experts of 2 groups of 3"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim = 16 differs"),
        ("youtu", {"v_head_dim": None}, "youtu model is not valid"),
        ("youtu", {"head_dim": 16}, "head_dim = 16 differs"),
        ("minicpm3", {"dim_model_base": 0}, "minicpm3 model is not valid"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        (
            "glm4_moe_lite",
            {"rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    kind, config = LATENT_MODELS[name]
    model = build_mixture(kind, **config)
    with pytest.raises(CetaneError, match=message):
        engine_of(model, recipe(), model.config.to_dict() | change)


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(sorted({kind for kind, _ in LATENT_MODELS.values()})))
    rotary = 2 * draw(st.integers(1, 5))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * draw(st.integers(3, 12)),
        "intermediate_size": draw(st.integers(1, 60)),
        "vocab_size": draw(st.integers(10, 300)),
        "q_lora_rank": draw(st.none() | st.integers(2, 20)),
        "kv_lora_rank": 2 * draw(st.integers(1, 12)),
        "qk_nope_head_dim": 2 * draw(st.integers(1, 6)),  # transformers turns no odd strides
        "qk_rope_head_dim": rotary,
        "head_dim": rotary,
        "v_head_dim": draw(st.integers(1, 12)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from([ROPES["default"], YARN])),
    }
    if kind not in ("minicpm3", "youtu"):
        config |= draw(experts(layers))
    if kind == "minicpm3":
        config |= {
            "scale_emb": draw(st.sampled_from([1, 3.5])),
            "scale_depth": draw(st.none() | st.floats(0.5, 2)),
            "dim_model_base": draw(st.none() | st.integers(8, 64)),
        }
    elif kind != "deepseek_v2":
        config["rope_interleave"] = draw(st.booleans())
    return kind, config


@st.composite
def experts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Keys of experts, of all model types that have some."""
    groups, size = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    opened = draw(st.integers(1, groups))
    return {
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "mlp_layer_types": [draw(st.sampled_from(["dense", "sparse"])) for _ in range(layers)],
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": opened,
        "num_experts_per_tok": draw(st.integers(1, opened * size)),
        "norm_topk_prob": draw(st.booleans()),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 1.5])),
    }


@settings(max_examples=25, derandomize=True)
@given(configs(), st.sampled_from(CONTRACTS), cuts)
def test_anything(config: tuple[str, dict[str, Any]], contract: str, pieces: list[int]) -> None:
    kind, settings = config
    assert_parity(
        build_mixture(kind, **settings), recipe(contract, "per-layer"), {"pieces": pieces}
    )
