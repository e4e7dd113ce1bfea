"""The Hugging Face config of a GGUF file, built from its metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cetane.checkpoint.gguf_architectures import Architecture
from cetane.checkpoint.gguf_file import GGUFFile
from cetane.errors import CetaneError

# Gemma 3: one layer in six sees all tokens; the others have a rotary base of their own.
_GEMMA_PERIOD = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
# SmolLM3: every fourth layer does not turn queries and keys. Not in the file.
_SMOLLM3_PERIOD = 4

# The scaling that all Llama 3 releases share. A GGUF file holds only the resulting factors.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """The arguments of `transformers.AutoConfig.for_model` for this model.

    Raises CetaneError for a missing field, and for a field without a Hugging Face equivalent.
    """
    keys = Keys(file)
    hidden = keys.integer("embedding_length")
    layers = keys.integer("block_count")
    if layers > len(file.tensors):
        raise CetaneError(f"{file.path} announces {layers} layers in {len(file.tensors)} tensors")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CetaneError(
            f"{file.path} has attention heads of odd width {head_dim}, which cannot rotate"
        )
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise CetaneError(f"{file.path} has keys and values of different widths")
    turned = keys.integer("rope.dimension_count", head_dim)
    if turned != head_dim and architecture.model_type != "phi3":
        raise CetaneError(f"{file.path} rotates only part of each head, which is not supported")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        # The table's own rows: the file may pad it beyond the tokenizer's vocabulary.
        "vocab_size": _embedding_rows(file, hidden),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, keys, head_dim),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = token_id if type(token_id) is int else None
    if architecture.model_type == "gemma2":
        return config | _gemma2(keys, config)
    if architecture.model_type == "gemma3_text":
        return config | _gemma3(keys, config)
    if keys.get("expert_count"):
        config |= _experts(keys, architecture.model_type)
    if architecture.model_type in ("llama", "qwen3", "granite", "smollm3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture.model_type == "olmo2" and keys.get("attention.sliding_window") is not None:
        config |= _olmo3(keys, config)
    if architecture.model_type == "gpt_oss":
        config |= _gpt_oss(keys, config)
    if architecture.model_type == "granite":
        config |= {name: keys.number(key) for name, key in _GRANITE.items()}
    if architecture.model_type == "smollm3":
        config["no_rope_layer_interval"] = _SMOLLM3_PERIOD
    if architecture.model_type == "phi3":
        config |= _phi3(file, keys, config, turned)
    return config | {"hidden_act": "silu"}


def _experts(keys: Keys, model_type: str) -> dict[str, Any]:
    """The numbers of experts, and of those that a token takes."""
    local = model_type in ("mixtral", "gpt_oss")
    count = "num_local_experts" if local else "num_experts"
    return {
        count: keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        **_EXPERTS.get(model_type, lambda _: {})(keys),
    }


_EXPERTS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    # That weights are divided by their sum is not in the file; all releases do it.
    "qwen3_moe": lambda keys: {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    },
}
"""What only some architectures have."""
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


class Keys:
    """Typed access to the metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise self.bad(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not float or not 0 < value < float("inf"):
            raise self.bad(key, "a positive number", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not str:
            raise self.bad(key, "a string", value)
        return value

    def bad(self, key: str, expected: str, value: Any) -> CetaneError:
        state = "is missing" if value is None else f"is {value!r}, not {expected}"
        return CetaneError(f"{self.file.path}: metadata {self.architecture}.{key} {state}")


def _embedding_rows(file: GGUFFile, hidden: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CetaneError(f"{file.path} has no token_embd.weight", "it holds no language model")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise CetaneError(
            f"{file.path}: token_embd.weight has shape {embedding.shape}, not (tokens, {hidden})"
        )
    return embedding.shape[0]


def _rope(file: GGUFFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    # llama.cpp's default; only old Llama files rely on it.
    theta = keys.number("rope.freq_base", 10_000.0 if keys.architecture == "llama" else None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = keys.text("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    elif kind != "none":
        raise CetaneError(f"{file.path} uses rope scaling {kind!r}, which is not supported")
    if kind == "yarn":
        length = keys.integer("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = length
    if "rope_freqs.weight" in file.tensors:
        if rope["rope_type"] != "default":
            raise CetaneError(f"{file.path} has both rope_freqs.weight and {kind} rope scaling")
        rope |= _llama3_scaling(file, theta, head_dim)
    return rope


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the factors of each frequency.

    In general, the factors do not determine the parameters. Meta's releases differ only in
    `factor`, so this takes the largest factor. Raises CetaneError if the other factors disagree
    with it.
    """
    stored = file.tensors["rope_freqs.weight"]
    if stored.dtype != "F32" or stored.shape != (head_dim // 2,):
        raise CetaneError(f"{file.path}: rope_freqs.weight is {stored.dtype} of {stored.shape}")
    factors = np.frombuffer(stored.read(), np.float32)
    factor = float(factors.max())
    low, high, length = _LLAMA3_SCALING.values()
    turns = length * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    with np.errstate(all="ignore"):  # a factor of 0 or NaN is refused below
        expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise CetaneError(
            f"{file.path}: rope_freqs.weight does not hold the factors of Llama 3's rope scaling",
            "use the model's safetensors, which name the scaling's parameters",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


def _phi3(file: GGUFFile, keys: Keys, config: dict[str, Any], turned: int) -> dict[str, Any]:
    """The part of each head that turns, its two tables, and the window."""
    rope = config["rope_parameters"] | {"partial_rotary_factor": turned / config["head_dim"]}
    known = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope_factors_long.weight" in file.tensors:
        rope["rope_type"] = "longrope"
        rope["original_max_position_embeddings"] = known
        rope["factor"] = config["max_position_embeddings"] / known
        for name in ("short", "long"):
            stored = file.tensors[f"rope_factors_{name}.weight"]
            if stored.dtype != "F32" or stored.shape != (turned // 2,):
                raise CetaneError(
                    f"{file.path}: rope_factors_{name}.weight is {stored.dtype} of {stored.shape}"
                )
            rope[f"{name}_factor"] = np.frombuffer(stored.read(), np.float32).tolist()
    window = keys.get("attention.sliding_window")  # llama.cpp writes 0 for none
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": known,
        "sliding_window": keys.integer("attention.sliding_window") if window else None,
    }


def _olmo3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is an "olmo2" with windows. Its sliding layers turn as if contexts were short."""
    slides = keys.get("attention.sliding_window_pattern")
    layers = config["num_hidden_layers"]
    if not isinstance(slides, np.ndarray) or slides.dtype != bool or len(slides) != layers:
        raise keys.bad("attention.sliding_window_pattern", f"{layers} booleans", slides)
    rope = config["rope_parameters"]
    short = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "rope_parameters": {"sliding_attention": short, "full_attention": rope},
    }


def _gpt_oss(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The window, and what the only releases have: biases, and a yarn that is not rounded."""
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "attention_bias": True,
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def _gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _scores_by(config),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _scores_by(config: dict[str, Any]) -> int:
    """Gemma's `query_pre_attn_scalar`, which is not in the file. As llama.cpp does, recognise the
    only exceptions, the models of 27B, by their depth."""
    if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[config["model_type"]]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    period = keys.integer("attention.sliding_window_pattern", _GEMMA_PERIOD)
    local_theta = keys.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
    gemma: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ],
        "query_pre_attn_scalar": _scores_by(config),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }
    if keys.get("final_logit_softcapping") is not None:
        gemma["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    return gemma
