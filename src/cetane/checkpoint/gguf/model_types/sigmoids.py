"""What models whose experts are weighed by a sigmoid of each add to the config of a GGUF file."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.model_types.facts import SIGMOID, Facts, check_one_base, of

_PERIOD = 4
"""AFMoE: every fourth layer sees all tokens, if the file does not say which."""


def after_dense(facts: Facts) -> dict[str, Any]:
    """MLPs in the first layers, experts in the others."""
    keys = facts.keys
    return facts.sigmoid_experts | {
        "first_k_dense_replace": keys.optional("leading_dense_block_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


@of("glm4_moe")
def _glm_moe(facts: Facts) -> dict[str, Any]:
    """Solar Open is a GLM whose heads rotate whole."""
    return facts.biased | after_dense(facts) | {
        "n_shared_experts": facts.keys.integer("expert_shared_count"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "rope_parameters": facts.turned_part,
    }  # fmt: skip


@of("dots1")
def _dots(facts: Facts) -> dict[str, Any]:
    """All layers see all tokens, as in the releases."""
    return facts.biased | after_dense(facts) | {
        "n_shared_experts": facts.keys.integer("expert_shared_count"),
        "layer_types": ["full_attention"] * facts.layers,
        "sliding_window": None,
    }  # fmt: skip


@of("exaone_moe")
def _exaone_moe(facts: Facts) -> dict[str, Any]:
    """Layers that slide have positions, the others have none."""
    check_one_base(facts)
    own, keys = after_dense(facts), facts.keys
    sparse = [index >= own["first_k_dense_replace"] for index in range(facts.layers)]
    return own | facts.windows(keys.sliding_layers(facts.layers)) | {
        "num_shared_experts": keys.integer("expert_shared_count"),
        "mlp_layer_types": facts.kinds("sparse", "dense", sparse),
    }  # fmt: skip


@of("afmoe")
def _afmoe(facts: Facts) -> dict[str, Any]:
    """llama.cpp multiplies embeddings in all of them, as the releases do."""
    check_one_base(facts)
    keys = facts.keys
    experts = facts.sigmoid_experts
    facts.check("expert_group_count", 1)
    facts.check("expert_weights_norm", True)
    return facts.biased | facts.windows(keys.sliding_layers(facts.layers, _PERIOD)) | {
        "num_dense_layers": keys.optional("leading_dense_block_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_shared_experts": keys.optional("expert_shared_count"),
        "route_scale": experts["routed_scaling_factor"],
        "mup_enabled": True,
    }  # fmt: skip


@of("minimax_m2")
def _minimax(facts: Facts) -> dict[str, Any]:
    """Weights are divided by their sum."""
    facts.check("expert_gating_func", SIGMOID)
    for key, plain in (("expert_group_count", 1), ("expert_weights_scale", 1.0)):
        facts.check(key, plain)
    return {
        "intermediate_size": facts.keys.integer("expert_feed_forward_length"),
        "rope_parameters": facts.turned_part,
    }
