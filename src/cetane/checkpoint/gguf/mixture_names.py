"""Hugging Face's names of the tensors of models with experts, by GGUF's."""

from __future__ import annotations

from cetane.checkpoint.gguf.names import (
    ATTENTION,
    HUNYUAN_NORMS,
    MLP,
    NORMS_BEFORE,
    POST_NORMS,
    QK_NORMS,
    QUERIES_ON_LATENT,
    Config,
    Names,
    weights,
)


def experts(home: str, router: str = "gate") -> Names:
    """The names of a router and of experts, in a part of the layer."""
    return weights(
        {
            "ffn_gate_inp": f"{home}.{router}",
            "ffn_gate_exps": f"{home}.experts.gate_proj",
            "ffn_up_exps": f"{home}.experts.up_proj",
            "ffn_down_exps": f"{home}.experts.down_proj",
        }
    )


EXPERTS = experts("mlp")
CORRECTED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""What is added to the scores of experts before they are chosen."""
GPT_OSS = (
    ATTENTION
    | EXPERTS
    | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.weight": "mlp.router.weight"}
    | weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
)
MIXTURE = ATTENTION | NORMS_BEFORE | EXPERTS


def shared(name: str, home: str = "mlp") -> Names:
    """The names of the expert that all tokens share; `name` is Hugging Face's for it."""
    return weights(
        {f"ffn_{part}_shexp": f"{home}.{name}.{part}_proj" for part in ("gate", "up", "down")}
    )


SHARED = shared("shared_expert") | weights({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
"""Qwen's expert that all tokens share."""
GRANITE_EXPERTS = experts("block_sparse_moe", "router")
GRANITE_PARTS = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj",
                  "down": "shared_mlp.output_linear"}  # fmt: skip
ALWAYS = weights({f"ffn_{part}_shexp": ours for part, ours in GRANITE_PARTS.items()})
"""Granite's MLP beside experts, which all tokens take."""
SHARED_MLP = weights({f"ffn_{part}": ours for part, ours in GRANITE_PARTS.items()})
"""The same where there are no experts."""


def granite_mixture(config: Config, index: int) -> Names:
    names = ATTENTION | NORMS_BEFORE | GRANITE_EXPERTS
    return names | (ALWAYS if config["model_type"] == "granitemoeshared" else {})


def deepseek2(config: Config, index: int) -> Names:
    latent = {
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
    }
    names = NORMS_BEFORE | weights(latent)
    if config["q_lora_rank"] is None:
        names |= weights({"attn_q": "self_attn.q_proj"})
    else:
        names |= QUERIES_ON_LATENT
    if index < config["first_k_dense_replace"]:
        return names | MLP
    names |= EXPERTS | shared("shared_experts")
    return names | (CORRECTED if config["model_type"] == "deepseek_v3" else {})


def ernie_mixture(config: Config, index: int) -> Names:
    names, first = ATTENTION | NORMS_BEFORE, config["moe_layer_start_index"]
    if index < first or (index + 1) % config["moe_layer_interval"]:
        return names | MLP
    if config["moe_num_shared_experts"]:
        names |= shared("shared_experts")
    corrections = "mlp.gate.moe_statics.e_score_correction_bias"
    return names | EXPERTS | {"exp_probs_b.bias": corrections}


def after_dense(config: Config, index: int) -> Names:
    """The MLP of the first layers, and the experts of the others, one of which all tokens share."""
    if index < config["first_k_dense_replace"]:
        return MLP
    return EXPERTS | CORRECTED | shared("shared_experts")


def glm_mixture(config: Config, index: int) -> Names:
    norms = QK_NORMS if config["use_qk_norm"] else {}
    return ATTENTION | POST_NORMS | norms | after_dense(config, index)


def dots_mixture(config: Config, index: int) -> Names:
    return ATTENTION | NORMS_BEFORE | QK_NORMS | after_dense(config, index)


def afmoe(config: Config, index: int) -> Names:
    own = {
        "attn_gate": "self_attn.gate_proj",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
    names = ATTENTION | QK_NORMS | POST_NORMS | weights(own)
    if index < config["num_dense_layers"]:
        return names | MLP
    names |= experts("mlp", "router.gate") | {"exp_probs_b.bias": "mlp.expert_bias"}
    return names | (shared("shared_experts") if config["num_shared_experts"] else {})


def llama4(config: Config, index: int) -> Names:
    home = "feed_forward"
    if (index + 1) % config["interleave_moe_layer_step"]:
        parts = {f"ffn_{part}": f"{home}.{part}_proj" for part in ("gate", "up", "down")}
        return ATTENTION | NORMS_BEFORE | weights(parts)
    return ATTENTION | NORMS_BEFORE | experts(home, "router") | shared("shared_expert", home)


def granite_windows(config: Config, index: int) -> Names:
    names = ATTENTION | NORMS_BEFORE | {"attn_sinks.weight": "self_attn.sinks"}
    if config["model_type"] == "granite_swa":
        return names | MLP
    home = "block_sparse_moe"
    modules = {
        "ffn_gate_inp": f"{home}.router",
        "ffn_gate_up_exps": f"{home}.experts.gate_up_proj",
        "ffn_down_exps": f"{home}.experts.down_proj",
    }
    if config["shared_intermediate_size"]:
        modules |= {
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        }
    return names | weights(modules)


PHIMOE = ATTENTION | NORMS_BEFORE | experts("mlp", "router")
MINIMAX = MIXTURE | QK_NORMS | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
HUNYUAN = (
    ATTENTION | NORMS_BEFORE | HUNYUAN_NORMS | experts("mlp", "gate.wg") | shared("shared_mlp")
)
