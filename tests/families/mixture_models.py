"""Small random mixtures of experts, behind attention as most models have it."""

from typing import Any

import torch
from tests.conftest import build_model
from tests.families.config_parts import MULTIPLIERS, OWN_ROPES, ROPES
from tests.families.parity import CONTEXT

DEEPSEEK_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 14,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
"""Experts as DeepSeek-V3 has them."""
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "dots1": (
        "dots1",
        DEEPSEEK_EXPERTS
        | {
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone_moe": (
        "exaone_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 7,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 14,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "glm4_moe": ("glm4_moe", DEEPSEEK_EXPERTS | {"use_qk_norm": True}),
    "granitemoe": ("granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 3} | MULTIPLIERS),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 28}
        | MULTIPLIERS,
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": [2, 3]}),
    "hy_v3": (
        "hy_v3",
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 16,
            "router_scaling_factor": 1.5,
            "mlp_bias": True,
        },
    ),
    "mellum": (
        "mellum",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "sliding_window": 7,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "rope_parameters": OWN_ROPES,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5},
        },
    ),
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
    "solar_open": ("solar_open", DEEPSEEK_EXPERTS | {"attention_bias": True}),
}


@torch.no_grad()
def build_mixture(kind: str, **config: Any) -> Any:
    """A random model, with numbers that correct the choice of experts where it has some. Like
    released ones, they are far from zero."""
    model = build_model(kind, **config)
    model.config._experts_implementation = "eager"  # the plainest arithmetic
    for module in model.modules():
        for numbers in module.buffers(recurse=False):
            if numbers is getattr(module, "e_score_correction_bias", None):
                numbers.copy_(8 + 0.2 * torch.randn_like(numbers))
    return model


OSS: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "num_hidden_layers": 3,
}


def build_oss(limit: float = 7.0, **config: Any) -> Any:
    """A random model. Sinks are large, and bounds are so near that some gates and ups meet them."""
    model = build_mixture("gpt_oss", **OSS | config, swiglu_limit=limit)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)
    return model


LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 20,
    "intermediate_size_mlp": 28,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [0, 2],
    "attention_chunk_size": CONTEXT,
    "floor_scale": CONTEXT + 1,
    "pad_token_id": None,
}


def build_llama4(**config: Any) -> Any:
    """A Llama 4 whose context ends where its chunks do."""
    return build_mixture("llama4_text", **LLAMA4 | config)


LFM2_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_dense_layers": 1,
}


@torch.no_grad()
def build_lfm2_moe(**config: Any) -> Any:
    """A random model whose experts are not compared by their weights alone."""
    model = build_mixture("lfm2_moe", **LFM2_EXPERTS | config)
    for name, biases in model.named_buffers():
        if name.endswith("expert_bias"):
            biases.normal_(std=0.3)
    return model


AFMOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 14,
    "route_scale": 1.5,
    "mup_enabled": True,
}


@torch.no_grad()
def build_afmoe(**config: Any) -> Any:
    """A random model; transformers' own routers begin with zeros. Corrections are far from zero,
    as released ones are."""
    model = build_mixture("afmoe", **AFMOE | config)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "router"):
            gate, numbers = layer.mlp.router.gate.weight, layer.mlp.expert_bias
            gate.copy_(torch.randn_like(gate))
            numbers.copy_(8 + 0.2 * torch.randn_like(numbers))
    return model
