"""Small random models with layers that keep all earlier tokens in a matrix: Mamba-2, and the gated
delta rule."""

from typing import Any

from hypothesis import strategies as st
from tests.conftest import TINY, build_model
from tests.families.config_parts import MULTIPLIERS
from tests.families.mixture_models import build_mixture

GRANITE_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 12,
    "shared_intermediate_size": 28,
} | MULTIPLIERS
GRANITE_HYBRIDS: dict[str, dict[str, Any]] = {
    "dense": GRANITE_LAYERS | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "mixture": GRANITE_LAYERS
    | {"mamba_n_groups": 2, "num_local_experts": 5, "num_experts_per_tok": 3},
}
LIMITS = st.sampled_from([(0.0, float("inf")), (0.001, float("inf")), (0.0, 1.0), (0.9, 1.4)])
"""Bounds of steps, whose random sizes are about 1.3."""


def build_hybrid(name: str, **config: Any) -> Any:
    """One of `GRANITE_HYBRIDS`."""
    return build_mixture("granitemoehybrid", **GRANITE_HYBRIDS[name] | config)


def mamba_keys(draw: st.DrawFn, heads: int, groups: int) -> dict[str, Any]:
    """The keys of layers of Mamba-2 that most of their configs have."""
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_head": "auto",
        "mamba_d_state": draw(st.integers(2, 12)),
        "mamba_d_conv": draw(st.integers(1, 5)),
        "mamba_expand": draw(st.integers(1, 2)),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "time_step_limit": draw(LIMITS),
    }


BAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": "auto",
    "mamba_d_state": 12,
}


def build_bamba(**config: Any) -> Any:
    """A Bamba."""
    return build_model("bamba", **BAMBA | config)


MAMBA2: dict[str, Any] = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12}
ATTENTION_KEYS = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
"""What a model without attention has no key for."""


def build_mamba2(**config: Any) -> Any:
    """A Mamba-2 alone."""
    model = build_model("mamba2", **MAMBA2 | config)
    for key in ATTENTION_KEYS:
        delattr(model.config, key)
    return model


SCANS: dict[str, dict[str, Any]] = {"mamba": {}, "falcon_mamba": {"mixer_rms_eps": 1e-3}}
"""The model types whose channels keep states of decays of their own."""

JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 6,
}
"""Scans and attention, an MLP or experts behind each."""


def build_jamba(**config: Any) -> Any:
    """A Jamba."""
    return build_mixture("jamba", **JAMBA | config)


def build_scan(kind: str, **config: Any) -> Any:
    """One of `SCANS`, alone."""
    own = {"state_size": 6, "expand": 2} | SCANS[kind] | config
    inner = own["expand"] * own.get("hidden_size", TINY["hidden_size"])
    model = build_model(kind, **own, intermediate_size=inner)
    for key in ATTENTION_KEYS:
        delattr(model.config, key)
    return model


FALCON: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_ssm": 48,
    "mamba_d_state": 12,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.4, 0.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.6,
    "mlp_multipliers": [1.5, 0.7],
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
}


def build_falcon(**config: Any) -> Any:
    """A Falcon-H1."""
    return build_model("falcon_h1", **FALCON | config)


NEMOTRON_TYPES = ("linear_attention", "moe", "full_attention", "mlp")
"""The types of layers of a Nemotron-H."""
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "moe_shared_expert_intermediate_size": 18,
    "routed_scaling_factor": 1.5,
}
NEMOTRONS: dict[str, dict[str, Any]] = {
    "dense": NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "mixture": NEMOTRON | {"layers_block_type": [*NEMOTRON_TYPES, "linear_attention"]},
}


def build_nemotron(name: str, **config: Any) -> Any:
    """One of `NEMOTRONS`."""
    return build_mixture("nemotron_h", **NEMOTRONS[name] | config)


DELTA_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
QWEN_NEXT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_LAYERS,
    "qwen3_next": DELTA_LAYERS | DELTA_EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": DELTA_LAYERS | DELTA_EXPERTS,
}
"""Qwen3-Next and Qwen3.5."""
OLMO_HYBRID = DELTA_LAYERS | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
"""Without positions, as released."""


def build_olmo_hybrid(**config: Any) -> Any:
    """An OLMo Hybrid."""
    return build_model("olmo_hybrid", **OLMO_HYBRID | config)
