"""The rotary parameters of a GGUF file, under Hugging Face's names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cetane.checkpoint.gguf.file import GGUFFile
from cetane.checkpoint.gguf.keys import Keys
from cetane.errors import CetaneError

_LLAMA3_SCALINGS = tuple(
    {
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    for high in (4.0, 1.0)
)
"""The scaling that all Llama 3 releases share, and that of Llama 4 Scout. A GGUF file holds only
the resulting factors."""

_BASE_UNSAID = (
    "falcon", "gemma", "gemma2", "gpt2", "gptneox", "llama", "minicpm3", "nemotron_h",
    "nemotron_h_moe", "phi2", "stablelm", "starcoder",
)  # fmt: skip
"""The architectures whose files may rely on llama.cpp's default base: of Llama, only old ones."""

_SAFETENSORS = "use the model's safetensors, which name the scaling's parameters"

_YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""What the converter takes from a config of its own, if that has them."""


def rope_parameters(file: GGUFFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """The parameters of all layers, or of those with full attention."""
    theta = keys.number("rope.freq_base", 10_000.0 if keys.architecture in _BASE_UNSAID else None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaled = "rope.scaling.factor"
    if keys.get(scaled) is None and keys.get("rope.scale_linear") is not None:
        scaled = "rope.scale_linear"  # the oldest files' name
    # To llama.cpp, a factor without a type is linear, and 0 is none.
    factor = keys.get(scaled)
    plain = factor is None or (isinstance(factor, float) and factor in (0.0, 1.0))
    kind = keys.text("rope.scaling.type", "none" if plain else "linear")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": keys.number(scaled)}
    elif kind != "none":
        raise CetaneError(f"{file.path} uses rope scaling {kind!r}, which is not supported")
    # llama.cpp applies these to any model. transformers has no such values, or its own.
    own = {"attn_factor": _attention_factor(keys, rope), "yarn_ext_factor": float(kind == "yarn")}
    for key, wanted in own.items():
        value = keys.get(f"rope.scaling.{key}")
        if value is not None and not (isinstance(value, float) and abs(value - wanted) <= 1e-4):
            raise CetaneError(f"{file.path}: rope.scaling.{key} is not {wanted:.6g}", _SAFETENSORS)
    if kind == "yarn":
        length = keys.integer("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = length
        for name, key in _YARN.items():
            if keys.get(f"rope.scaling.{key}") is not None:
                rope[name] = keys.number(f"rope.scaling.{key}")
    if "rope_freqs.weight" in file.tensors and keys.architecture != "gemma4":
        if rope["rope_type"] != "default":
            raise CetaneError(f"{file.path} has both rope_freqs.weight and {kind} rope scaling")
        rope |= _llama3_scaling(file, theta, head_dim)
    return rope


def _attention_factor(keys: Keys, rope: dict[str, Any]) -> float:
    """The factor on cosines and sines that the converter may write, and transformers computes.

    llama.cpp's conversion writes it for Phi-3's two tables (conversion/phi.py). In 2025 it did so
    for OLMo 3 (convert_hf_to_gguf.py).
    """
    if "rope_factors_long.weight" in keys.file.tensors:
        length = keys.integer("context_length")
        trained = keys.integer("rope.scaling.original_context_length", length)
        if length > trained > 1:
            return math.sqrt(1 + math.log(length / trained) / math.log(trained))
    elif keys.architecture == "olmo2" and rope["rope_type"] == "yarn":
        return 1 + 0.1 * math.log(max(rope["factor"], 1.0))
    return 1.0


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the factors of each frequency.

    In general, the factors do not determine the parameters. Meta's releases differ only in
    `factor` and in one bound, so this takes the largest factor. Raises CetaneError if the other
    factors agree with it for neither bound.
    """
    stored = file.tensors["rope_freqs.weight"]
    if stored.dtype != "F32" or stored.shape != (head_dim // 2,):
        raise CetaneError(f"{file.path}: rope_freqs.weight is {stored.dtype} of {stored.shape}")
    factors = np.frombuffer(stored.read(), np.float32)
    factor = float(factors.max())
    for scaling in _LLAMA3_SCALINGS:
        low, high, length = scaling.values()
        turns = length * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
        # Bounds may be equal, and a factor of 0 or NaN is refused below.
        with np.errstate(all="ignore"):
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, expected, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **scaling}
    raise CetaneError(
        f"{file.path}: rope_freqs.weight does not hold the factors of Llama 3's rope scaling",
        _SAFETENSORS,
    )
