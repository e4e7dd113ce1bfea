"""The Hugging Face config of a GGUF file, built from its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from cetane.checkpoint.gguf_architectures import Architecture
from cetane.checkpoint.gguf_file import GGUFFile
from cetane.errors import CetaneError

# Gemma 3: one layer in six sees all tokens; the others have a rotary base of their own.
_GEMMA_PERIOD = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62

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
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
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
    if architecture.model_type == "gemma3_text":
        return config | _gemma3(keys, config)
    if architecture.model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config | {"hidden_act": "silu"}


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
            raise self._bad(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not float or not 0 < value < float("inf"):
            raise self._bad(key, "a positive number", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not str:
            raise self._bad(key, "a string", value)
        return value

    def _bad(self, key: str, expected: str, value: Any) -> CetaneError:
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
        # Not in the file. As llama.cpp does, recognise the only exception, 27B, by its depth.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if layers == _GEMMA_27B_LAYERS
        else config["head_dim"],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }
    if keys.get("final_logit_softcapping") is not None:
        gemma["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    return gemma
