"""Small random Gemmas, in which every parameter matters, and recipes for them."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.parity import tokens

from cetane.schema.recipe import Recipe, parse_recipe
from cetane.schema.slots import CONTRACTS

CONTEXT = 64
SLIDING, FULL = "sliding_attention", "full_attention"
FEEDS = {
    "prefill": [64],
    "steps": [1] * 64,
    "steps of 4": [4] * 16,
    "uneven": [5, 1, 27, 2, 4, 3, 22],
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 32,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 20.0,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_key_value_heads": 1,
    "global_head_dim": 32,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 288,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
"""Layers 4 and 5 read the caches of 2 and 3."""


GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_key_value_heads": 1,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 280,
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.6, 0.4, 0.0, 0.0, 0.8],
    "final_logit_softcapping": 30.0,
}
"""Layers 4 and 5 read the caches of 2 and 3. The last 8 tokens have no per-layer embedding."""


def build_gemma2(**config: Any) -> Any:
    return build_model("gemma2", **GEMMA3 | {"attn_logit_softcapping": 2.0} | config)


def build_vaultgemma(**config: Any) -> Any:
    return build_model("vaultgemma", **GEMMA3 | {"attn_logit_softcapping": 2.0} | config)


def build_gemma3(**config: Any) -> Any:
    return build_model("gemma3_text", **GEMMA3 | config)


def build_gemma4(**config: Any) -> Any:
    """Its layers' scalars, which are no parameters, are random too; queries are short enough that
    scores, which nothing scales, do not make a choice of every softmax."""
    return scaled(build_model("gemma4_text", **GEMMA4 | config))


def build_gemma4_unified(**config: Any) -> Any:
    """The same, for layers without inputs of their own."""
    known = {key: value for key, value in (GEMMA4 | config).items() if "per_layer" not in key}
    return scaled(build_model("gemma4_unified_text", **known))


@torch.no_grad()
def scaled(model: Any) -> Any:
    """A Gemma 4 with other scalars and shorter queries."""
    for layer in model.model.layers:
        layer.layer_scalar.copy_(torch.rand(1) * 0.7 + 0.3)
        layer.self_attn.q_norm.weight *= layer.self_attn.head_dim**-0.5
    return model


def build_gemma3n(**config: Any) -> Any:
    """Queries are short, as in `build_gemma4`. Streams differ: what says so is random too."""
    model = build_model("gemma3n_text", **GEMMA3N | config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight *= layer.self_attn.head_dim**-0.5
    return model


def recipe(
    contract: str = "readonly",
    sliding: str | None = None,
    layout: dict[str, Any] | None = None,
    context: int = CONTEXT,
    windowed: bool = True,
    tokens: dict[str, Any] | None = None,
    capacities: tuple[int, ...] = (),
    **tables: Any,
) -> Recipe:
    content = {
        "name": "test",
        "layout": layout or {"kind": "chunks", "chunks": 2},
        "cache": {
            "contract": contract,
            "sliding": sliding,
            "context": context,
            "windowed": windowed,
            "capacities": capacities,
        },
        "tokens": tokens or {"verify": 4, "prefill": 8},
    }
    return parse_recipe(content | tables, "test")


LAYOUTS: list[dict[str, Any]] = [
    {"kind": "single"},
    {"kind": "per-block"},
    {"kind": "chunks"},
    {"kind": "chunks", "chunks": 2, "head": "last"},
]


@st.composite
def recipes(draw: st.DrawFn, layers: int) -> Recipe:
    """Any contracts, layout and widths."""
    contracts = st.sampled_from(list(CONTRACTS))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout.get("chunks", 1) > layers:
        layout = LAYOUTS[0]
    return recipe(
        contract=draw(contracts),
        sliding=draw(st.none() | contracts),
        layout=layout,
        windowed=draw(st.booleans()),
        tokens={
            "verify": draw(st.sampled_from([2, 4])),
            "prefill": draw(st.sampled_from([8, 24, 40])),
        },
        tensor_layout=draw(st.sampled_from(["c1t", "ct1"])),
        head={"slices": draw(st.integers(1, 3))},
        family={"full_block": draw(st.sampled_from([None, 5, 16, 32]))},
    )


def rope(draw: st.DrawFn, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Parameters for layers that see a window, and for those that see everything."""
    return {
        SLIDING: {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 1e4]))},
        FULL: {"rope_theta": draw(st.sampled_from([1e3, 1e6]))} | draw(st.sampled_from(kinds)),
    }


WINDOWS = [1, 7, 31, 32, 33, 63, 64, 100]
"""Shorter and longer than a prefill call and than the text; as long as the slots, and not."""


@st.composite
def gemma3_configs(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 4))
    kv, ratio = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    return {
        "num_hidden_layers": layers,
        "layer_types": [draw(st.sampled_from([SLIDING, FULL])) for _ in range(layers)],
        "sliding_window": draw(st.sampled_from(WINDOWS)),
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 12])),
        "head_dim": draw(st.sampled_from([4, 10, 16])),
        "intermediate_size": draw(st.integers(8, 60)),
        "vocab_size": draw(st.integers(20, 200)),
        "pad_token_id": None,
        "query_pre_attn_scalar": draw(st.sampled_from([4, 16, 24])),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0, 30.0])),
        "attn_logit_softcapping": draw(st.sampled_from([None, 50.0])),
        "rope_parameters": rope(
            draw, [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}]
        ),
    }


@st.composite
def gemma2_configs(draw: st.DrawFn) -> dict[str, Any]:
    """One rotary base for all layers, and scores with a bound, near and far."""
    return draw(gemma3_configs()) | {
        "attn_logit_softcapping": draw(st.sampled_from([None, 0.5, 50.0])),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    }


@st.composite
def gemma4_configs(draw: st.DrawFn) -> dict[str, Any]:
    """With and without sharing, per-layer embeddings, wide MLPs and values of their own."""
    layers = draw(st.integers(2, 5))
    kinds = [draw(st.sampled_from([SLIDING, FULL])) for _ in range(layers - 1)] + [FULL]
    own = max(kinds.index(kind) for kind in set(kinds)) + 1
    query = draw(st.sampled_from([2, 4]))
    width = draw(st.sampled_from([0, 4, 8]))
    vocab = draw(st.integers(20, 200))
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_kv_shared_layers": draw(st.integers(0, layers - own)),
        "sliding_window": draw(st.sampled_from(WINDOWS)),
        "num_attention_heads": query,
        "num_key_value_heads": draw(st.sampled_from([1, 2])),
        "num_global_key_value_heads": draw(st.sampled_from([None, 1, 2])),
        "attention_k_eq_v": draw(st.booleans()),
        "hidden_size": query * draw(st.sampled_from([8, 12])),
        "head_dim": draw(st.sampled_from([8, 12, 16])),
        "global_head_dim": draw(st.sampled_from([8, 16, 32])),
        "intermediate_size": draw(st.integers(8, 60)),
        "use_double_wide_mlp": draw(st.booleans()),
        "hidden_size_per_layer_input": width,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab + draw(st.sampled_from([0, 5])),
        "pad_token_id": None,
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0, 30.0])),
        "rope_parameters": rope(
            draw,
            [
                {"rope_type": "proportional", "partial_rotary_factor": 0.25},
                {"rope_type": "proportional", "partial_rotary_factor": 0.5},
                {"rope_type": "proportional"},
                {"rope_type": "default"},
                {"rope_type": "default", "partial_rotary_factor": 0.5},
            ],
        ),
    }


@st.composite
def gemma3n_configs(draw: st.DrawFn) -> dict[str, Any]:
    """With and without sharing; any number of streams, and any of them active; gates that open for
    all channels, for some and for few; tokens beyond the second table."""
    shared = draw(gemma4_configs())
    layers, vocab = shared["num_hidden_layers"], shared["vocab_size"]
    streams = draw(st.integers(2, 4))
    per_layer = st.lists(st.integers(8, 60), min_size=layers, max_size=layers)
    sparse = st.sampled_from([0.0, 0.0, 0.3, 0.5, 0.9])
    kept = (
        "num_hidden_layers", "layer_types", "num_kv_shared_layers", "sliding_window",
        "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "vocab_size",
        "pad_token_id", "attention_bias", "tie_word_embeddings",
    )  # fmt: skip
    return {key: shared[key] for key in kept} | {
        "intermediate_size": draw(st.integers(1, 60) | per_layer),
        "hidden_size_per_layer_input": draw(st.sampled_from([4, 8])),
        "vocab_size_per_layer_input": vocab - draw(st.sampled_from([-5, 0, 7])),
        "altup_num_inputs": streams,
        "altup_active_idx": draw(st.integers(0, streams - 1)),
        "altup_correct_scale": draw(st.booleans()),
        "laurel_rank": draw(st.integers(1, 9)),
        "activation_sparsity_pattern": draw(st.lists(sparse, min_size=layers, max_size=layers)),
        "final_logit_softcapping": draw(st.sampled_from([5.0, 30.0])),
        "rope_parameters": rope(
            draw, [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}]
        ),
    }


NO_TIES = {"sliding_window": 11, "rms_norm_eps": 1e-5}
"""With this epsilon no element of the tiny Gemma 4 lies so near the edge of two steps that the
order of a sum decides between them."""


@torch.inference_mode()
def masked_truth(model: Any, window: int, sinks: int = 0, length: int = CONTEXT) -> np.ndarray:
    """transformers' logits when its full layers see only a window, and the first tokens."""
    at = torch.arange(length)
    distance = at[:, None] - at[None]
    inside = {
        SLIDING: distance < model.config.sliding_window,
        FULL: (distance < window) | (at[None] < sinks),
    }
    masks = {
        kind: torch.where((distance >= 0) & seen, 0.0, -1e9)[None, None]
        for kind, seen in inside.items()
    }
    ids = torch.tensor([tokens(model.config.vocab_size, length)])
    return model(ids, attention_mask=masks, use_cache=False).logits[0].numpy()
