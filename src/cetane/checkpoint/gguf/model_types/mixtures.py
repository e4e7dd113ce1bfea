"""What models with experts add to the config of a GGUF file, and Granite's dense ones."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.model_types.facts import (
    SIGMOID,
    SOFTMAX,
    Facts,
    check_one_base,
    of,
    yarn_scales,
)

GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@of("granite", "granitemoe")
def _granite(facts: Facts) -> dict[str, Any]:
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
    keys, gating = facts.keys, facts.keys.get("expert_gating_func")
    if gating not in (None, SIGMOID):
        raise keys.bad("expert_gating_func", f"{SIGMOID}, which alone is supported", gating)
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": keys.get("expert_weights_norm") is True,
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
        value = keys.get(key)
        if value is not None and (type(value) is not type(plain) or value != plain):
            raise keys.bad(key, f"{plain}, which alone is supported", value)
    return {
        "first_k_dense_replace": keys.optional("leading_dense_block_count"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "topk_method": "greedy",
    }
