"""What Gemmas add to the config of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cetane.checkpoint.gguf.keys import Keys
from cetane.checkpoint.gguf.model_types.facts import (
    Facts,
    check_one_base,
    of,
)
from cetane.errors import CetaneError

_GEMMA_PERIOD = 6
"""Gemma 3: one layer in six sees all tokens; the others have a rotary base of their own."""
_LOCAL_THETA = 10_000.0
"""The rotary base of Gemma's sliding layers, if the file has none."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""The number of layers of the models of 27B (see `_scores_by`)."""


@of("gemma")
def _gemma(facts: Facts) -> dict[str, Any]:
    """Its config calls the activation otherwise than those of later Gemmas do."""
    return {"hidden_act": facts.config["hidden_activation"]}


@of("gemma2")
def _gemma2(facts: Facts) -> dict[str, Any]:
    check_one_base(facts)
    keys = facts.keys
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _scores_by(facts.config),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _scores_by(config: dict[str, Any]) -> int:
    """Gemma's `query_pre_attn_scalar`, which is not in the file. As llama.cpp does, recognise the
    only exceptions, the models of 27B, by their depth."""
    if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[config["model_type"]]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


@of("gemma3_text")
def _gemma3(facts: Facts) -> dict[str, Any]:
    keys = facts.keys
    period = keys.integer("attention.sliding_window_pattern", _GEMMA_PERIOD)
    slides = [(index + 1) % period != 0 for index in range(facts.layers)]
    local = keys.number("rope.freq_base_swa", _LOCAL_THETA)
    return (
        _bounded(keys)
        | facts.windows(slides)
        | {
            "query_pre_attn_scalar": _scores_by(facts.config),
            "rope_parameters": {
                "full_attention": facts.rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
    )


@of("gemma4_text")
def _gemma4(facts: Facts) -> dict[str, Any]:
    """Layers of two widths, the last of which may share keys and values."""
    keys, config, tensors = facts.keys, facts.config, facts.file.tensors
    slides = keys.sliding_layers(facts.layers)
    heads = keys.integers("attention.head_count_kv", facts.layers)
    inner = keys.integers("feed_forward_length", facts.layers)
    shared = _sharing(facts)
    full = [index for index, slide in enumerate(slides[: facts.layers - shared]) if not slide]
    local = [count for count, slide in zip(heads, slides, strict=True) if slide]
    wide = [count for count, slide in zip(heads, slides, strict=True) if not slide]
    per_layer = keys.optional("embedding_length_per_layer_input")
    own: dict[str, Any] = facts.windows(slides) | {
        "head_dim": keys.integer("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": (local or wide)[0],
        "num_global_key_value_heads": (wide or local)[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in full),
        "intermediate_size": min(inner),
        "use_double_wide_mlp": min(inner) != max(inner),
        "hidden_size_per_layer_input": per_layer,
        "rope_parameters": {
            "full_attention": facts.rope | _turned_pairs(facts),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", _LOCAL_THETA),
            },
        },
    }
    if per_layer:
        table = tensors.get("per_layer_token_embd.weight")
        if table is None:
            raise CetaneError(f"{facts.file.path} lacks tensor 'per_layer_token_embd.weight'")
        own["vocab_size_per_layer_input"] = table.shape[0]
    return _bounded(keys) | own


@of("gemma3n_text")
def _gemma3n(facts: Facts) -> dict[str, Any]:
    """Several streams, whose coefficients have a bound in all releases, and sparse MLPs."""
    keys, layers = facts.keys, facts.layers
    facts.check("altup.num_inputs", 4, missing=False)
    sparse = keys.numbers("gemma3n.activation_sparsity_scale", layers)
    table = facts.file.tensors.get("per_layer_token_embd.weight")
    if table is None:
        raise CetaneError(f"{facts.file.path} lacks tensor 'per_layer_token_embd.weight'")
    return facts.windows(keys.sliding_layers(layers)) | _bounded(keys) | {
        "intermediate_size": keys.integers("feed_forward_length", layers),
        "num_kv_shared_layers": _sharing(facts),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
        "altup_num_inputs": 4,
        "altup_active_idx": keys.optional("altup.active_idx"),
        "altup_correct_scale": True,
        "laurel_rank": facts.rows("laurel_l.weight"),
        "activation_sparsity_pattern": [_share_below(deviations) for deviations in sparse],
        "rope_parameters": {
            "full_attention": facts.rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", _LOCAL_THETA),
            },
        },
    }  # fmt: skip


def _sharing(facts: Facts) -> int:
    """The number of the last layers, which take keys and values of earlier ones. The first files of
    Gemma 3n have it as a float."""
    key, value = "attention.shared_kv_layers", facts.keys.get("attention.shared_kv_layers")
    whole = isinstance(value, float) and value.is_integer() and 0 <= value < facts.layers
    shared = int(value) if whole else facts.keys.optional(key)
    if shared >= facts.layers:
        raise facts.keys.bad(key, f"less than {facts.layers}", shared)
    return shared


def _share_below(deviations: float) -> float:
    """The share of a normal distribution below so many deviations. Configs name it in a few digits,
    of which the file has the deviations in fp32."""
    return round((1 + math.erf(deviations / math.sqrt(2))) / 2, 6)


def _bounded(keys: Keys) -> dict[str, Any]:
    """The bound of logits, if there is one."""
    key = "final_logit_softcapping"
    return {} if keys.get(key) is None else {key: keys.number(key)}


def _turned_pairs(facts: Facts) -> dict[str, Any]:
    """Full layers turn the first pairs of a head. The others' factor in the file is above 1e29."""
    half, stored = facts.config["head_dim"] // 2, facts.file.tensors.get("rope_freqs.weight")
    if stored is None or stored.dtype != "F32" or stored.shape != (half,):
        raise CetaneError(f"{facts.file.path} has no rope_freqs.weight of {half} numbers in F32")
    factors = np.frombuffer(stored.read(), np.float32)
    pairs = int((factors == 1).sum())
    if not (factors[:pairs] == 1).all() or not (factors[pairs:] >= 1e29).all():
        raise CetaneError(f"{facts.file.path}: rope_freqs.weight turns other pairs than the first")
    return {"rope_type": "proportional", "partial_rotary_factor": pairs / half}
