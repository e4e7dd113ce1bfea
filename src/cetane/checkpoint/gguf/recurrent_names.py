"""Hugging Face's names of the tensors of models whose layers carry a state, by GGUF's."""

from __future__ import annotations

from cetane.checkpoint.gguf.mixture_names import (
    ALWAYS,
    EXPERTS,
    GRANITE_EXPERTS,
    SHARED,
    SHARED_MLP,
    experts,
)
from cetane.checkpoint.gguf.names import (
    ATTENTION,
    BIASED,
    MLP,
    NORMS_BEFORE,
    ONE_NORM,
    POST_NORMS,
    QK_NORMS,
    QKV,
    Config,
    Names,
    weights,
)

DELTA = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"} | weights(
    {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)


FEED_FORWARD = weights(
    {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
)
"""The MLP of Bamba and Falcon-H1."""
NEMOTRON_ATTENTION = {"q": "q", "k": "k", "v": "v", "output": "o"}
NEMOTRON_EXPERTS = {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"} | weights(
    {
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    }
)
"""Experts without gates."""


def mamba(home: str) -> Names:
    """The names of a Mamba-2, in a part of the layer."""
    vectors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    modules = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_out": "out_proj"}
    return {theirs: f"{home}.{ours}" for theirs, ours in vectors.items()} | weights(
        {theirs: f"{home}.{ours}" for theirs, ours in modules.items()}
    )


def granite_hybrid(config: Config, index: int) -> Names:
    """Mamba-2 or attention. A model without experts has the MLP that others share with all."""
    mixes = config["layer_types"][index] == "mamba"
    mixer = mamba("mamba") | weights({"ssm_norm": "mamba.norm"}) if mixes else ATTENTION
    if not config["num_local_experts"]:
        return NORMS_BEFORE | mixer | SHARED_MLP
    return NORMS_BEFORE | mixer | GRANITE_EXPERTS | ALWAYS


def bamba(config: Config, index: int) -> Names:
    """Mamba-2 or attention, and an MLP."""
    attends = index in config["attn_layer_indices"]
    mixer = ATTENTION if attends else mamba("mamba") | weights({"ssm_norm": "mamba.norm"})
    return ONE_NORM | mixer | FEED_FORWARD | weights({"ffn_norm": "pre_ff_layernorm"})


def mamba2(config: Config, index: int) -> Names:
    return mamba("mixer") | weights({"attn_norm": "norm", "ssm_norm": "mixer.norm"})


def nemotron_h(config: Config, index: int) -> Names:
    """One part in each layer."""
    parts = {
        "linear_attention": mamba("mixer") | weights({"ssm_norm": "mixer.norm"}),
        "full_attention": weights(
            {f"attn_{theirs}": f"mixer.{ours}_proj" for theirs, ours in NEMOTRON_ATTENTION.items()}
        ),
        "mlp": weights({"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}),
        "moe": NEMOTRON_EXPERTS,
    }
    return weights({"attn_norm": "norm"}) | parts[config["layers_block_type"][index]]


def falcon_h1(config: Config, index: int) -> Names:
    """Mamba-2 and attention beside each other."""
    names = ONE_NORM | ATTENTION | mamba("mamba") | FEED_FORWARD
    names |= {"ffn_norm": "pre_ff_layernorm.weight"}  # this one has no ending
    return names | (weights({"ssm_norm": "mamba.norm"}) if config["mamba_rms_norm"] else {})


def lfm2(config: Config, index: int) -> Names:
    modules = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    if index < config.get("num_dense_layers", config["num_hidden_layers"]):
        parts = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
        modules |= {theirs: f"feed_forward.{ours}" for theirs, ours in parts.items()}
    if config["layer_types"][index] == "conv":
        parts = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
        return weights(modules | parts)
    norms = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    return QKV | weights(modules | norms | {"attn_output": "self_attn.out_proj"})


def lfm2_mixture(config: Config, index: int) -> Names:
    names = lfm2(config, index)
    if index < config["num_dense_layers"]:
        return names
    return names | experts("feed_forward") | {"exp_probs_b.bias": "feed_forward.expert_bias"}


def mixer(config: Config, index: int) -> Names:
    """The delta rule or attention of a Qwen3-Next or Qwen3.5."""
    if config["layer_types"][index] == "full_attention":
        return POST_NORMS | ATTENTION | QK_NORMS
    if config["model_type"] == "qwen3_next":
        return POST_NORMS | DELTA | weights({"ssm_ba": "linear_attn.in_proj_ba"})
    rates = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
    return POST_NORMS | DELTA | weights(rates)


def qwen35(config: Config, index: int) -> Names:
    return mixer(config, index) | MLP


def qwen_mixture(config: Config, index: int) -> Names:
    return mixer(config, index) | EXPERTS | SHARED


LFM2_TOP = weights(
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
     "output": "lm_head"}
)  # fmt: skip
MAMBA_BIASED = (*BIASED, "conv1d")
MAMBA2_TOP = weights(
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
)
NEMOTRON_TOP = weights(
    {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
)
