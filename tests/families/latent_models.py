"""Configs of small DeepSeeks and their relatives, whose attention reads latents."""

from typing import Any

LATENTS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 14,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK = LATENTS | EXPERTS
"""Of a DeepSeek-V2."""
ONE_GROUP = {"n_group": 1, "topk_group": 1}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | GROUPS | {"q_lora_rank": 16}),
    "moonlight": ("deepseek_v3", DEEPSEEK | ONE_GROUP),
    "halves": ("deepseek_v3", DEEPSEEK | ONE_GROUP | {"rope_interleave": False}),
    "plain weights": ("deepseek_v3", DEEPSEEK | GROUPS | {"norm_topk_prob": False}),
    "glm4_moe_lite": ("glm4_moe_lite", DEEPSEEK | {"q_lora_rank": 16}),
    "minicpm3": (
        "minicpm3",
        LATENTS | {"q_lora_rank": 16, "dim_model_base": 16, "scale_emb": 3, "scale_depth": 1.1},
    ),
    "youtu": ("youtu", LATENTS | {"q_lora_rank": 16, "tie_word_embeddings": True}),
}
