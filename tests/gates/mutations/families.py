"""Tiny random models of every family, and the recipes that port them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.conftest import build_model, build_tokenizer
from tests.families.alibi_models import build_alibi
from tests.families.config_parts import MINISTRAL, MULTIPLIERS, ROPES, STRETCHED
from tests.families.gemma_models import (
    FULL,
    SLIDING,
    build_gemma2,
    build_gemma3,
    build_gemma3n,
    build_gemma4,
    build_gemma4_unified,
    build_vaultgemma,
)
from tests.families.latent_models import LATENT_MODELS
from tests.families.layer_normed_models import build_layer_normed
from tests.families.matrix_models import (
    QWEN_NEXT,
    build_bamba,
    build_falcon,
    build_hybrid,
    build_jamba,
    build_mamba2,
    build_nemotron,
    build_olmo_hybrid,
    build_scan,
)
from tests.families.mixture_models import (
    MIXTURES,
    build_afmoe,
    build_lfm2_moe,
    build_llama4,
    build_mixture,
    build_oss,
)
from tests.families.zaya_models import build_zaya

from cetane.checkpoint import Tokenizer
from cetane.gates.experts import is_router
from cetane.schema.recipe import Recipe, parse_recipe

LONG_YARN = MINISTRAL | {"original_max_position_embeddings": 256}
"""A table that holds for the gate's texts."""
SWASH = MULTIPLIERS | {
    "num_hidden_layers": 3,
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 32,
    "layer_rope_theta": [0, 1e4, 100.0],
}
"""A Granite with windows: a layer without positions, and two with bases of their own."""
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: build_model("llama", num_hidden_layers=3),
    "mistral": lambda: build_model("mistral", num_hidden_layers=3, sliding_window=32),
    "qwen2": lambda: build_model("qwen2", num_hidden_layers=3),
    "qwen3": lambda: build_model("qwen3", num_hidden_layers=3),
    "ministral": lambda: build_model(
        "ministral", num_hidden_layers=3, sliding_window=32, layer_types=[SLIDING, FULL, SLIDING]
    ),
    "ministral3": lambda: build_model(
        "ministral3", num_hidden_layers=3, rope_parameters=LONG_YARN, max_position_embeddings=1024
    ),
    "smollm3": lambda: build_model("smollm3", num_hidden_layers=4),
    "granite": lambda: build_model("granite", num_hidden_layers=3, **MULTIPLIERS),
    "internlm3": lambda: build_model("internlm3", num_hidden_layers=3),
    "iquestcoder": lambda: build_model("iquestcoder", num_hidden_layers=3),
    "exaone": lambda: build_model("exaone", num_hidden_layers=3),
    "phi3": lambda: build_model("phi3", num_hidden_layers=3, sliding_window=32),
    "apertus": lambda: build_model(
        "apertus", num_hidden_layers=3, rope_parameters=ROPES["default"]
    ),
    "nanochat": lambda: build_model("nanochat", num_hidden_layers=3),
    "arcee": lambda: build_model("arcee", num_hidden_layers=3),
    "bitnet": lambda: build_model("bitnet", num_hidden_layers=3, hidden_act="relu2"),
    "cwm": lambda: build_model("cwm", num_hidden_layers=5, sliding_window=32, bos_token_id=0),
    "ernie4_5": lambda: build_model("ernie4_5", num_hidden_layers=3),
    "helium": lambda: build_model("helium", num_hidden_layers=3),
    "hunyuan_v1_dense": lambda: build_model(
        "hunyuan_v1_dense", num_hidden_layers=3, rope_parameters=ROPES["linear"] | STRETCHED
    ),
    "hyperclovax": lambda: build_model("hyperclovax", num_hidden_layers=3, **MULTIPLIERS),
    "seed_oss": lambda: build_model("seed_oss", num_hidden_layers=3),
    "exaone4": lambda: build_model("exaone4", num_hidden_layers=4, sliding_window=32),
    "glm": lambda: build_model("glm", num_hidden_layers=3),
    "glm4": lambda: build_model("glm4", num_hidden_layers=3),
    "cohere": lambda: build_layer_normed("cohere", num_hidden_layers=3, use_qk_norm=True),
    "cohere2": lambda: build_layer_normed("cohere2", num_hidden_layers=4, sliding_window=32),
    "falcon": lambda: build_layer_normed("falcon", num_hidden_layers=3),
    "gpt_neox": lambda: build_layer_normed("gpt_neox", num_hidden_layers=3),
    "gpt2": lambda: build_model("gpt2", num_hidden_layers=3),
    "gpt_bigcode": lambda: build_model("gpt_bigcode", num_hidden_layers=3),
    "gpt_neo": lambda: build_model(
        "gpt_neo",
        num_hidden_layers=3,
        attention_types=[[["local", "global", "local"], 1]],
        window_size=32,
    ),
    "opt": lambda: build_model("opt", num_hidden_layers=3, ffn_dim=80),
    "gptj": lambda: build_model("gptj", num_hidden_layers=3, rotary_dim=8),
    "codegen": lambda: build_model("codegen", num_hidden_layers=3, rotary_dim=8),
    "bloom": lambda: build_alibi("bloom", num_hidden_layers=3),
    "mpt": lambda: build_alibi("mpt", num_hidden_layers=3),
    "jais2": lambda: build_layer_normed("jais2", num_hidden_layers=3),
    "persimmon": lambda: build_layer_normed("persimmon", num_hidden_layers=3),
    "nemotron": lambda: build_layer_normed("nemotron", num_hidden_layers=3),
    "olmo": lambda: build_layer_normed("olmo", num_hidden_layers=3, clip_qkv=0.5),
    "phi": lambda: build_layer_normed("phi", num_hidden_layers=3),
    "stablelm": lambda: build_layer_normed("stablelm", num_hidden_layers=3, use_qkv_bias=True),
    "starcoder2": lambda: build_layer_normed(
        "starcoder2", num_hidden_layers=3, sliding_window=32, tie_word_embeddings=True
    ),
    "olmo2": lambda: build_model("olmo2", num_hidden_layers=3),
    "olmo3": lambda: build_model("olmo3", num_hidden_layers=4, sliding_window=32),
    "lfm2": lambda: build_model(
        "lfm2", num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"]
    ),
    "lfm3": lambda: build_model(
        "lfm3",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        sliding_window=32,
    ),
    "lfm2_moe": lambda: build_lfm2_moe(
        num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"]
    ),
    "ernie4_5_moe": lambda: build_mixture(
        "ernie4_5_moe",
        num_hidden_layers=3,
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=20,
        moe_num_shared_experts=1,
    ),
    "dots1": lambda: three_mixture_layers("dots1"),
    "glm4_moe": lambda: three_mixture_layers("glm4_moe"),
    "exaone_moe": lambda: build_mixture(
        "exaone_moe", **MIXTURES["exaone_moe"][1] | {"sliding_window": 32}
    ),
    "mellum": lambda: build_mixture("mellum", **MIXTURES["mellum"][1] | {"sliding_window": 32}),
    "solar_open": lambda: three_mixture_layers("solar_open"),
    "hunyuan_v1_moe": lambda: build_mixture(
        "hunyuan_v1_moe", num_hidden_layers=3, num_experts=4, moe_topk=[2, 1, 3]
    ),
    "granitemoeshared": lambda: build_mixture(
        "granitemoeshared",
        num_hidden_layers=3,
        num_local_experts=4,
        shared_intermediate_size=24,
        **MULTIPLIERS,
    ),
    "granitemoe": lambda: build_mixture(
        "granitemoe", num_hidden_layers=3, num_local_experts=4, **MULTIPLIERS
    ),
    "granite_swa": lambda: build_model("granite_swa", **SWASH),
    "granitemoe_swa": lambda: build_mixture("granitemoe_swa", **SWASH, num_local_experts=4),
    "granitemoehybrid": lambda: build_hybrid("mixture", logits_scaling=1.0),
    "falcon_h1": lambda: build_falcon(num_hidden_layers=3),
    "bamba": build_bamba,
    "mamba": lambda: build_scan("mamba", num_hidden_layers=3),
    "falcon_mamba": lambda: build_scan("falcon_mamba", num_hidden_layers=3),
    "jamba": build_jamba,
    "mamba2": lambda: build_mamba2(num_hidden_layers=3),
    "nemotron_h": lambda: build_nemotron("mixture"),
    "olmo_hybrid": build_olmo_hybrid,
    "mixtral": lambda: build_mixture("mixtral", num_hidden_layers=3, num_local_experts=4),
    "phimoe": lambda: build_mixture(
        "phimoe", num_hidden_layers=3, num_local_experts=5, lm_head_bias=True
    ),
    "hy_v3": lambda: three_mixture_layers("hy_v3"),
    "minimax_m2": lambda: three_mixture_layers("minimax_m2"),
    "qwen2_moe": lambda: build_mixture(
        "qwen2_moe",
        num_hidden_layers=3,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
    ),
    "qwen3_moe": lambda: build_mixture(
        "qwen3_moe",
        num_hidden_layers=3,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
    "olmoe": lambda: build_mixture(
        "olmoe", num_hidden_layers=3, num_experts=5, num_experts_per_tok=2, clip_qkv=0.5
    ),
    "flex_olmo": lambda: build_mixture(
        "flex_olmo", num_hidden_layers=3, num_experts=5, num_experts_per_tok=2
    ),
    "afmoe": lambda: build_afmoe(sliding_window=32),
    "llama4": lambda: build_llama4(
        attention_chunk_size=256,
        floor_scale=256,
        num_experts_per_tok=2,
        moe_layers=[0, 1],
        no_rope_layers=[0, 1, 1],
    ),
    "gpt_oss": lambda: build_oss(limit=0.3, sliding_window=32),
    "qwen3_next": lambda: build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"]),
    "qwen3_5": lambda: build_mixture("qwen3_5_text", **QWEN_NEXT["qwen3_5_text"]),
    "qwen3_5_moe": lambda: build_mixture("qwen3_5_moe_text", **QWEN_NEXT["qwen3_5_moe_text"]),
    "deepseek_v2": lambda: three_latent_layers("deepseek_v2"),
    "deepseek_v3": lambda: three_latent_layers("deepseek_v3"),
    "glm4_moe_lite": lambda: three_latent_layers("glm4_moe_lite"),
    "minicpm3": lambda: three_latent_layers("minicpm3"),
    "youtu": lambda: three_latent_layers("youtu"),
    "gemma": lambda: build_model("gemma", num_hidden_layers=3, tie_word_embeddings=True),
    "gemma2": build_gemma2,
    "gemma3": build_gemma3,
    "vaultgemma": build_vaultgemma,
    "gemma3n": build_gemma3n,
    "gemma4": build_gemma4,
    "gemma4_unified": build_gemma4_unified,
    "zaya": lambda: build_zaya(vocab_size=288),
}
FORMATS = {
    "fp16": "fp16",
    "int8": "int8-per-channel",
    "6 bits": "palette6-kmeans-group1",
    "4 bits": "palette4-kmeans-group1",
}
CONTEXT = 160
CORRECTIONS = ("balancing_biases", "e_score_correction_bias", "expert_bias")
"""What is added to scores before experts are chosen, by the names in transformers."""


def three_latent_layers(name: str) -> Any:
    """A DeepSeek, or a relative."""
    kind, config = LATENT_MODELS[name]
    return build_mixture(kind, **config | {"num_hidden_layers": 3})


def three_mixture_layers(name: str) -> Any:
    """A dots.llm1 or a GLM-4.5. Layers that slide see as many tokens as those of others do."""
    kind, config = MIXTURES[name]
    window = {"sliding_window": 32} if name == "dots1" else {}
    return build_mixture(kind, **config | {"num_hidden_layers": 3} | window)


def build(family: str, seed: int = 0) -> Any:
    """A model of a family; every seed gives other weights."""
    with seeded(seed):
        return FAMILIES[family]()


@torch.no_grad()
def flattened(model: Any, factor: float) -> Any:
    """The model with routers that weigh experts nearly alike: their logits are `factor` times as
    large."""
    for router in filter(is_router, model.modules()):
        mlp = getattr(router, "router_mlp", None)
        for parameter in (router if mlp is None else mlp.out_proj).parameters():
            parameter *= factor
    for name, numbers in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(CORRECTIONS):
            numbers *= factor
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The builders of the tests have a seed of their own: here it is another."""
    original = torch.manual_seed
    torch.manual_seed = lambda _: original(seed)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.manual_seed = original


def recipe(form: str, quality: str = "usable", **tables: Any) -> Recipe:
    """Two chunks, a head in three slices, calls of 1, 4 and 16 tokens."""
    content = {
        "name": "mutated",
        "quality": quality,
        "layout": {"kind": "chunks", "chunks": 2},
        "cache": {"contract": "readonly", "context": CONTEXT},
        "tokens": {"verify": 4, "prefill": 16},
        "head": {"slices": 3},
        "compression": {"default": FORMATS.get(form, form)},
    }
    return parse_recipe(content | tables, "mutated")


@cache
def tokenizer_of() -> Tokenizer:
    """The tokenizer of all tiny models."""
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        return Tokenizer.load(Path(folder))
