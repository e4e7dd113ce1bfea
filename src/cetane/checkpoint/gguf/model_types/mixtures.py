"""What models with experts add to the config of a GGUF file, and Granite's dense ones."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.model_types.facts import (
    SOFTMAX,
    Facts,
    check_one_base,
    of,
    trained_context,
    two_tables,
    yarn_scales,
)
from cetane.errors import CetaneError

_PHIMOE_CONTEXTS = 4096, 131072
"""The positions that Phi-3.5-MoE was trained for first, and that it has."""
_PHIMOE_MSCALE = 1.243163121016122
"""What it multiplies cosines and sines by. llama.cpp computes another factor."""
_MAVERICK = 128
"""The number of experts of the only Llama 4 that does not norm queries and keys (llama.cpp)."""
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@of("granite", "granitemoe")
def _granite(facts: Facts) -> dict[str, Any]:
    facts.check("rope.scaling.finetuned", True)  # without it, llama.cpp turns nothing
    own = facts.biased | {name: facts.keys.number(key) for name, key in GRANITE.items()}
    shared = facts.keys.optional("expert_shared_feed_forward_length")
    if shared:
        own |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared,
                "architectures": ["GraniteMoeSharedForCausalLM"]}  # fmt: skip
    return own


@of("qwen2_moe")
def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    """That weights are not divided by their sum is not in the file; no release does it."""
    keys = facts.keys
    return {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": facts.has("attn_q.bias"),
    }


@of("qwen3_moe")
def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    """That weights are divided by their sum is not in the file; all releases do it."""
    inner = facts.keys.integer("expert_feed_forward_length")
    return {"moe_intermediate_size": inner, "norm_topk_prob": True}


@of("gpt_oss")
def _gpt_oss(facts: Facts) -> dict[str, Any]:
    """The window, and what the only releases have: biases, and a yarn that is not rounded."""
    check_one_base(facts)
    return {
        "intermediate_size": facts.keys.integer("expert_feed_forward_length"),
        "sliding_window": facts.keys.integer("attention.sliding_window"),
        "attention_bias": True,
        "rope_parameters": facts.rope | {"truncate": False},
    }


@of("ernie4_5_moe")
def _ernie_moe(facts: Facts) -> dict[str, Any]:
    keys = facts.keys
    return {
        "use_bias": facts.has("attn_q.bias"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.optional("expert_shared_count"),
        "moe_layer_start_index": keys.optional("leading_dense_block_count"),
        "moe_layer_end_index": facts.layers - 1,
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


@of("deepseek_v2")
def _deepseek(facts: Facts) -> dict[str, Any]:
    """Heads that share one latent."""
    keys, rotary_width = facts.keys, facts.rotary_width
    facts.check("attention.temperature_scale", 0.0)  # a Mistral's
    corrected = any(name.endswith("exp_probs_b.bias") for name in facts.file.tensors)
    third = corrected or not keys.optional("expert_count")
    width = keys.integer("attention.key_length_mla")
    if width <= rotary_width:
        raise keys.bad("attention.key_length_mla", f"more than {rotary_width}", width)
    rank = keys.get("attention.q_lora_rank")
    return {
        "num_key_value_heads": facts.config["num_attention_heads"],
        "head_dim": rotary_width,
        "q_lora_rank": None if rank is None else keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_width,
        "qk_nope_head_dim": width - rotary_width,
        "v_head_dim": keys.integer("attention.value_length_mla"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "rope_parameters": facts.rope | yarn_scales(facts, 0.1),
    } | (_of_deepseek_v3(facts) if third else _plain_experts(facts))


def _of_deepseek_v3(facts: Facts) -> dict[str, Any]:
    """What DeepSeek-V3 adds: experts weighed by a sigmoid of each, in groups; or no experts."""
    keys = facts.keys
    return facts.sigmoid_experts | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": (
            keys.optional("leading_dense_block_count")
            if keys.optional("expert_count")
            else facts.layers
        ),
        "n_shared_experts": keys.optional("expert_shared_count"),
    }


def _plain_experts(facts: Facts) -> dict[str, Any]:
    """Only a softmax without groups weighs a DeepSeek-V2's experts."""
    keys = facts.keys
    for key, plain in (("expert_gating_func", SOFTMAX), ("expert_group_count", 1),
                       ("expert_weights_norm", False)):  # fmt: skip
        facts.check(key, plain)
    return {
        "first_k_dense_replace": keys.optional("leading_dense_block_count"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "topk_method": "greedy",
    }


@of("hunyuan_v1_moe")
def _hunyuan_moe(facts: Facts) -> dict[str, Any]:
    """One expert that all tokens share, as wide as the others."""
    keys, width = facts.keys, facts.config["intermediate_size"]
    facts.check("expert_shared_count", 1)
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        facts.check(key, width)
    taken = [keys.integer("expert_used_count")] * facts.layers
    return facts.biased | {"moe_topk": taken}


@of("phimoe")
def _phimoe(facts: Facts) -> dict[str, Any]:
    """The file lacks the factor of stretched positions, which only Phi-3.5-MoE has."""
    keys, rope = facts.keys, facts.rope | two_tables(facts)
    facts.check("expert_used_count", 2)
    if rope["rope_type"] == "longrope":
        contexts = trained_context(facts), facts.config["max_position_embeddings"]
        if contexts != _PHIMOE_CONTEXTS:
            raise CetaneError(
                f"{facts.file.path} stretches positions by factors that it does not name",
                "use the model's safetensors, which name short_mscale and long_mscale",
            )
        rope |= {"short_mscale": _PHIMOE_MSCALE, "long_mscale": _PHIMOE_MSCALE}
    return facts.biased | {
        "rope_parameters": rope,
        "sliding_window": keys.optional("attention.sliding_window") or None,  # 0 is none
        "lm_head_bias": "output.bias" in facts.file.tensors,
    }


@of("mellum")
def _mellum(facts: Facts) -> dict[str, Any]:
    """Experts in every layer: the converter takes no others."""
    keys, rope = facts.keys, facts.rope
    local = keys.number("rope.freq_base_swa", rope["rope_theta"])
    return facts.windows(keys.sliding_layers(facts.layers)) | facts.biased | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "mlp_layer_types": ["sparse"] * facts.layers,
        "norm_topk_prob": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": rope,
        },
    }  # fmt: skip


@of("llama4_text")
def _llama4(facts: Facts) -> dict[str, Any]:
    check_one_base(facts)
    keys = facts.keys
    if keys.get("attention.sliding_window") is not None:
        raise keys.bad(
            "attention.sliding_window",
            "left out, as in all Llama 4 whose attention is in chunks",
            keys.get("attention.sliding_window"),
        )
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.config["intermediate_size"],
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": keys.integer("expert_count") != _MAVERICK,
    } | facts.biased


@of("granite_swa")
def _granite_windows(facts: Facts) -> dict[str, Any]:
    """Layers that slide, and layers without positions. Experts in all layers, or in none."""
    keys, base, layers = facts.keys, facts.rope["rope_theta"], facts.layers
    pattern = "attention.rope_pattern"
    turns = [True] * layers if keys.get(pattern) is None else keys.booleans(pattern, layers)
    own = facts.windows(keys.sliding_layers(layers)) | facts.biased | {
        name: keys.number(key) for name, key in GRANITE.items()
    } | {
        "layer_rope_theta": [base if turn else 0.0 for turn in turns],
        "mlp_bias": facts.has("ffn_up.bias"),
    }  # fmt: skip
    if keys.optional("expert_count"):
        own |= {
            "model_type": "granitemoe_swa",
            "architectures": ["GraniteMoeSWAForCausalLM"],
            "shared_intermediate_size": keys.optional("expert_shared_feed_forward_length"),
        }
    return own
