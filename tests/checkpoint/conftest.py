"""Tiny models in every form that `open_checkpoint` reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import gguf_files

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
GRANITE_HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    **MAMBA,
    **MULTIPLIERS,
    "mamba_d_head": 16,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
}
GATED: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
NEMOTRON: dict[str, Any] = {
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 10,
    "n_groups": 2,
}
GRANITE_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "layer_rope_theta": [0, 1e4, 1e4, 1e4],
    "sliding_window": 7,
    **MULTIPLIERS,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # general.architecture, then what the config has beyond TINY
    "llama": ("llama", {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}),
    "llama-tied": ("llama", {"model_type": "llama", "tie_word_embeddings": True}),
    "llama-bias": ("llama", {"model_type": "llama", "attention_bias": True}),
    "qwen2": ("qwen2", {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-yarn": (
        "qwen2",
        {
            "model_type": "qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
            },
        },
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 16}),
    "granite": (
        "granite",
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "arcee": ("arcee", {"model_type": "arcee", "attention_bias": True}),
    "ernie": ("ernie4_5", {"model_type": "ernie4_5", "head_dim": 24}),
    "exaone": ("exaone", {"model_type": "exaone", "tie_word_embeddings": True}),
    "exaone4": (
        "exaone4",
        {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 7},
    ),
    "exaone4-full": (
        "exaone4",
        {
            "model_type": "exaone4",
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
        },
    ),
    "cohere": ("command-r", {"model_type": "cohere", "head_dim": 8, "logit_scale": 0.25}),
    "cohere-norms": ("command-r", {"model_type": "cohere", "head_dim": 8, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {"model_type": "cohere2", "num_hidden_layers": 5, "sliding_window": 7, "head_dim": 8},
    ),
    "ernie-moe": (
        "ernie4_5-moe",
        {
            "model_type": "ernie4_5_moe",
            "head_dim": 24,
            "num_hidden_layers": 3,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "falcon-h1": (
        "falcon-h1",
        {"model_type": "falcon_h1", "head_dim": 8, "mamba_d_ssm": 48, **MAMBA, "mamba_d_head": 12},
    ),
    "glm": ("chatglm", {"model_type": "glm", "head_dim": 8, "rms_norm_eps": 1e-5}),
    "gpt2": ("gpt2", {"model_type": "gpt2", "n_inner": 48, "tie_word_embeddings": True}),
    "starcoder": ("starcoder", {"model_type": "gpt_bigcode", "tie_word_embeddings": True}),
    "gptneox": ("gptneox", {"model_type": "gpt_neox", "use_parallel_residual": False}),
    "granitehybrid": ("granitehybrid", GRANITE_HYBRID),
    "granitehybrid-experts": (
        "granitehybrid",
        GRANITE_HYBRID
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
    ),
    "granitemoe-shared": (
        "granitemoe",
        {
            "model_type": "granitemoeshared",
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
            **MULTIPLIERS,
        },
    ),
    "jais2": ("jais2", {"model_type": "jais2", "head_dim": 8}),
    "minicpm3": (
        "minicpm3",
        {
            "model_type": "minicpm3",
            "num_key_value_heads": 4,
            "q_lora_rank": 14,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
    ),
    "nemotron": ("nemotron", {"model_type": "nemotron", "head_dim": 8}),
    "olmo": ("olmo", {"model_type": "olmo", "clip_qkv": 0.5}),
    "phi2": ("phi2", {"model_type": "phi"}),
    "stablelm": ("stablelm", {"model_type": "stablelm", "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"model_type": "stablelm", "use_parallel_residual": True}),
    "starcoder2": (
        "starcoder2",
        {"model_type": "starcoder2", "sliding_window": None, "tie_word_embeddings": True},
    ),
    "glm4": ("glm4", {"model_type": "glm4", "head_dim": 24}),
    "hunyuan": (
        "hunyuan-dense",
        {
            "model_type": "hunyuan_v1_dense",
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "seed": (
        "seed_oss",
        {"model_type": "seed_oss", "head_dim": 24, "attention_out_bias": True},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "model_type": "granitemoe",
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "deepseek3": (
        "deepseek2",
        {"model_type": "deepseek_v3", "q_lora_rank": 14, **LATENT, **GROUPED},
    ),
    "smollm3": ("smollm3", {"model_type": "smollm3", "num_hidden_layers": 5}),
    "olmo2": ("olmo2", {"model_type": "olmo2"}),
    "olmo3": (
        "olmo2",
        {
            "model_type": "olmo3",
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "olmo3-bases": (
        "olmo2",
        {
            "model_type": "olmo3",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": ("llama", {"model_type": "mixtral", "num_local_experts": 4}),
    "olmoe": ("olmoe", {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt-oss",
        {
            "model_type": "gpt_oss",
            "head_dim": 16,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
        },
    ),
    "qwen2moe": (
        "qwen2moe",
        {
            "model_type": "qwen2_moe",
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen3moe": (
        "qwen3moe",
        {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("phi3", {"model_type": "phi3", "sliding_window": 9}),
    "phi3-longrope": (
        "phi3",
        {
            "model_type": "phi3",
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 4.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 3.0],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "mistral3-plain-yarn": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": YARN
            | {"mscale": 0.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "mistral3-no-temperature": (
        "mistral3",
        {
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
            "max_position_embeddings": 256,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "model_type": "lfm2",
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2moe": (
        "lfm2moe",
        {
            "model_type": "lfm2_moe",
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3next": ("qwen3next", {"model_type": "qwen3_next", **DELTA, **EXPERTS}),
    "qwen35": ("qwen35", {"model_type": "qwen3_5_text", **DELTA}),
    "qwen35moe": ("qwen35moe", {"model_type": "qwen3_5_moe_text", **DELTA, **EXPERTS}),
    "deepseek2": (
        "deepseek2",
        {"model_type": "deepseek_v2", "q_lora_rank": None, **LATENT},
    ),
    "deepseek2-queries": (
        "deepseek2",
        {"model_type": "deepseek_v2", "q_lora_rank": 14, **LATENT},
    ),
    "glm4moe": (
        "glm4moe",
        {
            "model_type": "glm4_moe",
            "head_dim": 12,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "use_qk_norm": True,
            **GATED,
        },
    ),
    "glm4moe-air": (
        "glm4moe",
        {
            "model_type": "glm4_moe",
            "head_dim": 8,
            **GATED,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "model_type": "phimoe",
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "phimoe-longrope": (
        "phimoe",
        {
            "model_type": "phimoe",
            "num_local_experts": 4,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "model_type": "mamba2",
            "intermediate_size": 64,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 6,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "falcon": ("falcon", {"model_type": "falcon", "ffn_hidden_size": 48, "num_kv_heads": 4}),
    "falcon-groups": (
        "falcon",
        {
            "model_type": "falcon",
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "minimax": (
        "minimax-m2",
        {
            "model_type": "minimax_m2",
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        {
            "model_type": "hunyuan_v1_moe",
            "head_dim": 8,
            "num_experts": 5,
            "moe_topk": [2, 2],
            "attention_bias": True,
        },
    ),
    "dots1": (
        "dots1",
        {
            "model_type": "dots1",
            "head_dim": 12,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3,
            **GATED,
        },
    ),
    "exaone-moe": (
        "exaone-moe",
        {
            "model_type": "exaone_moe",
            "head_dim": 12,
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "afmoe": (
        "afmoe",
        {
            "model_type": "afmoe",
            "head_dim": 12,
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    ),
    "llama4": (
        "llama4",
        {
            "model_type": "llama4_text",
            "head_dim": 12,
            "num_hidden_layers": 5,
            "intermediate_size": 20,
            "intermediate_size_mlp": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
        },
    ),
    "gemma3n": (
        "gemma3n",
        {
            "model_type": "gemma3n_text",
            "head_dim": 16,
            "num_hidden_layers": 5,
            "intermediate_size": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 2,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 64,
            "laurel_rank": 5,
            "altup_num_inputs": 4,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            **NEMOTRON,
        },
    ),
    "nemotron-h-moe": (
        "nemotron_h_moe",
        {
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **NEMOTRON,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
        },
    ),
    "apertus": (
        "apertus",
        {
            "model_type": "apertus",
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "bamba": (
        "granitehybrid",
        {"model_type": "bamba", **MAMBA, "mamba_d_head": 16, "attn_layer_indices": [1]},
    ),
    "granite-swa": (
        "granite_swa",
        {
            "model_type": "granite_swa",
            **GRANITE_WINDOWS,
        },
    ),
    "granite-swa-experts": (
        "granite_swa",
        {
            "model_type": "granitemoe_swa",
            **GRANITE_WINDOWS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
        },
    ),
    "mellum": (
        "mellum",
        {
            "model_type": "mellum",
            "head_dim": 12,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse"] * 4,
        },
    ),
    "solar": (
        "glm4moe",
        {
            "model_type": "solar_open",
            "head_dim": 12,
            **GATED,
            "first_k_dense_replace": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": 1,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 64,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": (
        "gemma",
        {"model_type": "gemma", "head_dim": 16, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "gemma2": (
        "gemma2",
        {
            "model_type": "gemma2",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.fixture(autouse=True)
def own_cache(own_cache: Path) -> Path:
    """Every test of this room has its own."""
    return own_cache


def build_variant(variant: str, **others: Any) -> transformers.PreTrainedModel:
    """A random model of the named variant, with norms and biases that are not their defaults;
    `others` change its config."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**(TINY | VARIANTS[variant][1] | others))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.normal_(std=0.3)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], transformers.PreTrainedModel]:
    """`tiny_model(variant)`: `build_variant` without changes."""
    return build_variant


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write a model of the named variant."""

    def write(path: Path, variant: str, model: transformers.PreTrainedModel, **how: Any) -> Path:
        return gguf_files.write_gguf(path, VARIANTS[variant][0], model, **how)

    return write
