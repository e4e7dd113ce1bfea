"""Hugging Face's names of a model's tensors, by those that llama.cpp's converter writes.

`blk.3.` and `model.layers.3.` are left out: names are those in a layer. Source: llama.cpp's
conversion scripts and gguf-py's tensor_mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
Names = dict[str, str]
"""Hugging Face's names, by GGUF's."""


def weights(modules: Names) -> Names:
    """The names of the weights of some modules."""
    return {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in modules.items()}


TOP = weights(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
QKV = weights(
    {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
)
ATTENTION = QKV | weights({"attn_output": "self_attn.o_proj"})
QK_NORMS = weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
NORMS_BEFORE = weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
NORMS_AFTER = weights(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GEMMA_NORMS = NORMS_AFTER | weights(
    {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
)
# What these models call post_attention_layernorm is llama.cpp's post_attention_norm.
POST_NORMS = weights(
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
)
MLP = weights({"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
UNGATED = weights({"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
ONE_NORM = weights({"attn_norm": "input_layernorm"})
HUNYUAN_NORMS = weights(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
GLM = (
    ATTENTION | NORMS_BEFORE | weights({"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})
)
GLM4 = ATTENTION | weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    }
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
FUSED = weights(
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
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
GPT_OSS = (
    ATTENTION
    | EXPERTS
    | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.weight": "mlp.router.weight"}
    | weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
)
LLAMA = ATTENTION | NORMS_BEFORE | MLP
MIXTURE = ATTENTION | NORMS_BEFORE | EXPERTS

BIASED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "router",
    "experts.gate_proj", "experts.up_proj", "experts.down_proj",
)  # fmt: skip
"""The modules that may have biases."""
LAYER_NORMED = (*BIASED, "up_proj", "down_proj", "layernorm", "model.norm")
"""The same in models with layer norms, whose other matrices may have biases too."""


def shared(name: str) -> Names:
    """The names of the expert that all tokens share; `name` is Hugging Face's for it."""
    return weights(
        {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}
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


def cohere(config: Config, index: int) -> Names:
    return ONE_NORM | ATTENTION | MLP | (QK_NORMS if config["use_qk_norm"] else {})


def stablelm(config: Config, index: int) -> Names:
    norms = ONE_NORM if config["use_parallel_residual"] else NORMS_BEFORE
    return norms | ATTENTION | MLP


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


def falcon_h1(config: Config, index: int) -> Names:
    """Mamba-2 and attention beside each other."""
    parts = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    names = ONE_NORM | ATTENTION | mamba("mamba") | weights(parts)
    names |= {"ffn_norm": "pre_ff_layernorm.weight"}
    return names | (weights({"ssm_norm": "mamba.norm"}) if config["mamba_rms_norm"] else {})


def granite_mixture(config: Config, index: int) -> Names:
    names = ATTENTION | NORMS_BEFORE | GRANITE_EXPERTS
    return names | (ALWAYS if config["model_type"] == "granitemoeshared" else {})


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


QUERIES_ON_LATENT = weights(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
    }
)


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
    corrected = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    return names | (corrected if config["model_type"] == "deepseek_v3" else {})


def ernie_mixture(config: Config, index: int) -> Names:
    names, first = ATTENTION | NORMS_BEFORE, config["moe_layer_start_index"]
    if index < first or (index + 1) % config["moe_layer_interval"]:
        return names | MLP
    if config["moe_num_shared_experts"]:
        names |= shared("shared_experts")
    corrections = "mlp.gate.moe_statics.e_score_correction_bias"
    return names | EXPERTS | {"exp_probs_b.bias": corrections}


def gemma4(config: Config, index: int) -> Names:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    names = GEMMA_NORMS | MLP | {"layer_output_scale.weight": "layer_scalar"}
    if config["hidden_size_per_layer_input"]:
        names |= weights(
            {
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
            }
        )
    attention = ATTENTION | QK_NORMS
    absent = ("attn_k.", "attn_v.", "attn_k_norm.") if index >= layers - shared else ()
    if config["attention_k_eq_v"] and config["layer_types"][index] == "full_attention":
        absent = (*absent, "attn_v.")
    return names | {k: v for k, v in attention.items() if not k.startswith(absent)}


PER_LAYER = weights(
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
LFM2_TOP = weights(
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
     "output": "lm_head"}
)  # fmt: skip

MINICPM3 = (
    NORMS_BEFORE
    | QUERIES_ON_LATENT
    | MLP
    | weights(
        {
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_output": "self_attn.o_proj",
        }
    )
)
NO_NORM = weights({"token_embd": "model.embed_tokens", "output": "lm_head"})
"""OLMo's norms have no weights."""
PHI = (
    ONE_NORM
    | QKV
    | weights({"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"})
)
PHI_TOP = TOP | weights({"output_norm": "model.final_layernorm"})
PHI_BIASED = (*LAYER_NORMED, "dense", "fc1", "fc2", "lm_head")
MAMBA_BIASED = (*BIASED, "conv1d")
GPT2 = weights(
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)
GPT2_TOP = weights(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)
GPT2_BIASED = ("ln_1", "ln_2", "ln_f", "c_attn", "c_proj", "c_fc")
NEOX = NORMS_BEFORE | weights(
    {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
NEOX_TOP = weights(
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "lm_head",
    }
)
