"""The Hugging Face config of a GGUF file, built from its metadata."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.architectures import Architecture
from cetane.checkpoint.gguf.file import GGUFFile
from cetane.checkpoint.gguf.keys import Keys
from cetane.checkpoint.gguf.model_types import OWN, Facts
from cetane.checkpoint.gguf.rope import rope_parameters
from cetane.errors import CetaneError

_ROTARY_IN_PART = (
    "bamba", "deepseek_v2", "glm", "glm4", "glm4_moe", "gpt_neox", "minicpm3", "minimax_m2",
    "nemotron", "nemotron_h", "phi", "phi3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "stablelm",
)  # fmt: skip
"""The model types that say which part of a head rotates."""
_WIDTHS_OF_THEIR_OWN = ("deepseek_v2", "minicpm3")
"""The model types whose keys and values have widths under other keys."""
_EXPERTS = dict.fromkeys(
    ("gpt_oss", "granite_swa", "granitemoe", "granitemoehybrid", "llama4_text", "mellum",
     "minimax_m2", "mixtral", "phimoe"),
    "num_local_experts",
) | {
    "deepseek_v2": "n_routed_experts", "dots1": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts", "glm4_moe": "n_routed_experts",
    "nemotron_h": "n_routed_experts",
}  # fmt: skip
"""The keys for the number of experts, where it is another one than most have."""
_TAKEN = {"ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk"}
"""The same for the number of those that a token takes."""
_COMPUTE_WIDTHS = ("falcon",)
"""The model types whose configs compute the width of heads, and take none."""
_WITHOUT_ATTENTION = ("mamba2",)
"""The model types that have neither attention nor MLPs."""
_LAYER_NORMED = {
    "cohere": "layer_norm_eps", "cohere2": "layer_norm_eps", "gpt2": "layer_norm_epsilon",
    "gpt_bigcode": "layer_norm_epsilon", "falcon": "layer_norm_epsilon",
    "nemotron_h": "layer_norm_epsilon",
    "gpt_neox": "layer_norm_eps", "jais2": "layer_norm_eps",
    "nemotron": "norm_eps", "olmo": "layer_norm_eps", "phi": "layer_norm_eps",
    "stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon",
}  # fmt: skip
"""The model types with layer norms, and their config's key for the epsilon."""


def build_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """The arguments of `transformers.AutoConfig.for_model` for this model.

    Raises CetaneError for a missing field, and for a field without a Hugging Face equivalent.
    """
    keys, kind = Keys(file), architecture.model_type
    if keys.get("attention.causal") is False:
        raise CetaneError(
            f"{file.path}: attention.causal = False: only causal models generate text"
        )
    hidden, layers = keys.integer("embedding_length"), layer_count(keys)
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [architecture.model_class],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        **epsilon(keys, kind),
        "max_position_embeddings": keys.integer("context_length"),
        # The table's own rows: the file may pad it beyond the tokenizer's vocabulary.
        "vocab_size": vocabulary(file, hidden),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = token_id if type(token_id) is int else None
    rotary_width = 0
    if kind not in _WITHOUT_ATTENTION:
        attention, rotary_width = attention_and_mlp(keys, kind, hidden, layers)
        config |= attention
    if kind.startswith("gemma"):
        config["hidden_activation"] = "gelu_pytorch_tanh"
    else:
        config["hidden_act"] = "silu"
    if keys.optional("expert_count"):
        config |= experts(keys, kind)
    if kind in _COMPUTE_WIDTHS:
        del config["head_dim"]
    own = OWN.get(kind)
    return config | own(Facts(file, keys, config, rotary_width)) if own else config


def attention_and_mlp(
    keys: Keys, kind: str, hidden: int, layers: int
) -> tuple[dict[str, Any], int]:
    """The sizes of attention and MLPs, and the channels of a head that rotate."""
    file = keys.file
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CetaneError(
            f"{file.path} has attention heads of odd width {head_dim}, which cannot rotate"
        )
    values = keys.integer("attention.value_length", head_dim)
    if values != head_dim and kind not in _WIDTHS_OF_THEIR_OWN:
        raise CetaneError(f"{file.path} has keys and values of different widths")
    rotary_width = keys.integer("rope.dimension_count", head_dim)
    if rotary_width != head_dim and kind not in _ROTARY_IN_PART:
        raise CetaneError(f"{file.path} rotates only part of each head, which is not supported")
    inner = keys.get("expert_feed_forward_length") if keys.optional("expert_count") else None
    return {
        # The widest, where layers differ; and where all have experts, the file may name none.
        "intermediate_size": max(keys.integers("feed_forward_length", layers, inner)),
        "num_attention_heads": heads,
        "num_key_value_heads": max(keys.integers("attention.head_count_kv", layers, heads)),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(file, keys, head_dim),
    }, rotary_width


def epsilon(keys: Keys, model_type: str) -> dict[str, float]:
    """The epsilon of all norms: layer norms, or those of the mean square."""
    if model_type == "mamba2":
        return {"layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon")}
    if model_type in _LAYER_NORMED:
        return {_LAYER_NORMED[model_type]: keys.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def layer_count(keys: Keys) -> int:
    """The layers of the model, without those that only draft tokens."""
    layers = keys.integer("block_count")
    if layers > len(keys.file.tensors):
        raise CetaneError(
            f"{keys.file.path} announces {layers} layers in {len(keys.file.tensors)} tensors"
        )
    drafts = keys.optional("nextn_predict_layers")
    if drafts >= layers:
        raise keys.bad("nextn_predict_layers", f"less than {layers} layers", drafts)
    return layers - drafts


def experts(keys: Keys, model_type: str) -> dict[str, Any]:
    """The numbers of experts, and of those that a token takes."""
    return {
        _EXPERTS.get(model_type, "num_experts"): keys.integer("expert_count"),
        _TAKEN.get(model_type, "num_experts_per_tok"): keys.integer("expert_used_count"),
    }


def vocabulary(file: GGUFFile, width: int) -> int:
    """The rows of the embedding, which must have this width."""
    name = "token_embd.weight"
    table = file.tensors.get(name)
    if table is None:
        raise CetaneError(f"{file.path} has no {name}", "it holds no language model")
    if len(table.shape) != 2 or table.shape[1] != width:
        raise CetaneError(f"{file.path}: {name} has shape {table.shape}, not (tokens, {width})")
    return table.shape[0]
