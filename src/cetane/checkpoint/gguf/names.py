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
LLAMA = ATTENTION | NORMS_BEFORE | MLP

BIASED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "router",
    "experts.gate_proj", "experts.up_proj", "experts.down_proj",
)  # fmt: skip
"""The modules that may have biases."""
LAYER_NORMED = (*BIASED, "up_proj", "down_proj", "layernorm", "model.norm")
"""The same in models with layer norms, whose other matrices may have biases too."""


def cohere(config: Config, index: int) -> Names:
    return ONE_NORM | ATTENTION | MLP | (QK_NORMS if config["use_qk_norm"] else {})


def stablelm(config: Config, index: int) -> Names:
    norms = ONE_NORM if config["use_parallel_residual"] else NORMS_BEFORE
    return norms | ATTENTION | MLP


QUERIES_ON_LATENT = weights(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
    }
)


LAYER_INPUTS = weights(
    {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
"""What mixes a layer's own embedding into it."""
KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def shares_keys(config: Config, index: int) -> bool:
    """Whether a layer takes keys and values of an earlier one."""
    return index >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)


def own_keys(config: Config, index: int, attention: Names) -> Names:
    """Attention without keys and values where the layer takes those of an earlier one."""
    absent = KEYS_AND_VALUES if shares_keys(config, index) else ()
    return {theirs: ours for theirs, ours in attention.items() if theirs not in absent}


def gemma4(config: Config, index: int) -> Names:
    names = GEMMA_NORMS | MLP | {"layer_output_scale.weight": "layer_scalar"}
    if config["hidden_size_per_layer_input"]:
        names |= LAYER_INPUTS
    attention = own_keys(config, index, ATTENTION | QK_NORMS)
    if config["attention_k_eq_v"] and config["layer_types"][index] == "full_attention":
        attention.pop("attn_v.weight", None)
    return names | attention


PER_LAYER = weights(
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)

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
FALCON_TOP = weights(
    {
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)


def falcon(config: Config, index: int) -> Names:
    """Groups of heads have two norms beside each other, or one, as all heads together have."""
    norms = {"attn_norm": "input_layernorm"}
    if config["num_ln_in_parallel_attn"] == 2:
        norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    modules = {
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
    return weights(norms | modules)


APERTUS = (
    ATTENTION
    | QK_NORMS
    | UNGATED
    | weights({"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
)


def gemma3n(config: Config, index: int) -> Names:
    modules = {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
    attention = own_keys(config, index, ATTENTION | QK_NORMS)
    scale = {"altup_correct_scale.weight": "altup.correct_output_scale"}
    return attention | GEMMA_NORMS | MLP | LAYER_INPUTS | weights(modules) | scale


STREAMS = {
    "altup_proj.weight": "altup_projections",
    "altup_unembd_proj.weight": "altup_unembed_projections",
}
GEMMA3N_TOP = TOP | {
    f"{theirs}.{index}": f"model.{ours}.{index}.weight"
    for theirs, ours in STREAMS.items()
    for index in range(3)
}
"""Gemma 3n's streams beside the first, of which all releases have three."""
