"""What models whose layers carry a state add to the config of a GGUF file."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.model_types.facts import SIGMOID, Facts, of
from cetane.checkpoint.gguf.model_types.mixtures import GRANITE
from cetane.errors import CetaneError

_PARTS = {"ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention",
          "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}  # fmt: skip
"""The parts of a Nemotron-H, each with a tensor that it alone has."""


@of("lfm2")
def _lfm2(facts: Facts) -> dict[str, Any]:
    return _convolved(facts) | {"block_auto_adjust_ff_dim": False}


@of("lfm2_moe")
def _lfm2_moe(facts: Facts) -> dict[str, Any]:
    """Weights of experts are sigmoids with a bias each, and divided by their sum: all releases have
    both, and llama.cpp computes nothing else."""
    keys = facts.keys
    gating = keys.integer("expert_gating_func")
    if gating != SIGMOID:
        raise keys.bad("expert_gating_func", f"{SIGMOID}, which alone is supported", gating)
    return _convolved(facts) | {
        "num_dense_layers": keys.optional("leading_dense_block_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _convolved(facts: Facts) -> dict[str, Any]:
    """A layer without key/value heads is a convolution."""
    heads = facts.keys.integers("attention.head_count_kv", facts.layers)
    facts.check("attention.sliding_window", 0)
    return {
        "layer_types": facts.kinds("full_attention", "conv", [count > 0 for count in heads]),
        "norm_eps": facts.config["rms_norm_eps"],
        "conv_L_cache": facts.keys.integer("shortconv.l_cache"),
    }


@of("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
def _delta(facts: Facts) -> dict[str, Any]:
    """The delta rule, the layers that attend instead, and experts where there are some."""
    keys, heads = facts.keys, facts.keys.integer("ssm.time_step_rank")
    width = keys.integer("ssm.inner_size")
    if width % heads:
        raise keys.bad("ssm.inner_size", f"a multiple of {heads} heads", width)
    if heads % keys.integer("ssm.group_count"):
        raise keys.bad("ssm.group_count", f"a divisor of {heads}", keys.get("ssm.group_count"))
    own: dict[str, Any] = {
        "layer_types": facts.kinds("full_attention", "linear_attention", _attends(facts)),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "rope_parameters": facts.turned_part,
    }
    if keys.optional("expert_count"):
        own["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
        shared = "expert_shared_feed_forward_length"
        own["shared_expert_intermediate_size"] = keys.integer(shared)
    return own


def _attends(facts: Facts) -> list[bool]:
    """Whether each layer attends: by a list of those that do not, or else by a period."""
    keys, key = facts.keys, "attention.recurrent_layers"
    if keys.get(key) is not None:
        return [not recurrent for recurrent in keys.booleans(key, facts.layers)]
    period = keys.integer("full_attention_interval")
    return [(index + 1) % period == 0 for index in range(facts.layers)]


@of("granitemoehybrid")
def _granite_hybrid(facts: Facts) -> dict[str, Any]:
    """Mamba-2 in the layers without key/value heads. An MLP that all tokens take, with or without
    experts beside it."""
    keys, config = facts.keys, facts.config
    heads = keys.integers("attention.head_count_kv", facts.layers)
    shared = keys.optional("expert_shared_feed_forward_length")
    rotates = keys.get("rope.scaling.finetuned")
    return {name: keys.number(key) for name, key in GRANITE.items()} | _mamba(facts) | {
        "layer_types": facts.kinds("attention", "mamba", [count > 0 for count in heads]),
        "mamba_expand": _inner(facts, config["hidden_size"], "channels"),
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": keys.optional("expert_count"),
        "shared_intermediate_size": shared or config["intermediate_size"],
        "attention_bias": False,
    }  # fmt: skip


@of("falcon_h1")
def _falcon_h1(facts: Facts) -> dict[str, Any]:
    """The file's weights hold all multipliers."""
    own = _mamba(facts) | {
        "mamba_d_ssm": facts.keys.integer("ssm.inner_size"),
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }
    names = ("attention_in", "attention_out", "ssm_in", "ssm_out", "key", "embedding", "lm_head")
    return own | {f"{name}_multiplier": 1.0 for name in names}


@of("bamba")
def _bamba(facts: Facts) -> dict[str, Any]:
    keys, config = facts.keys, facts.config
    heads = keys.integers("attention.head_count_kv", facts.layers)
    facts.check("rope.scaling.finetuned", True)
    return _mamba(facts) | {
        "attn_layer_indices": [index for index, count in enumerate(heads) if count],
        "mamba_expand": _inner(facts, config["hidden_size"], "channels"),
        "attention_bias": False,
        "rope_parameters": facts.turned_part,
    }


@of("mamba2")
def _mamba2(facts: Facts) -> dict[str, Any]:
    sizes = _mamba(facts)
    names = {"n_heads": "num_heads", "d_head": "head_dim", "d_state": "state_size",
             "n_groups": "n_groups", "d_conv": "conv_kernel", "conv_bias": "use_conv_bias",
             "proj_bias": "use_bias"}  # fmt: skip
    return {ours: sizes[f"mamba_{theirs}"] for theirs, ours in names.items()} | {
        "expand": _inner(facts, facts.config["hidden_size"], "channels")
    }


@of("nemotron_h")
def _nemotron_h(facts: Facts) -> dict[str, Any]:
    """Which part a layer has, its tensors say. None has positions."""
    keys, sizes = facts.keys, _mamba(facts)
    kinds = [_part(facts, index) for index in range(facts.layers)]
    own: dict[str, Any] = {
        "layers_block_type": kinds,
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "ssm_state_size": sizes["mamba_d_state"],
        "n_groups": sizes["mamba_n_groups"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
    }
    if "mlp" in kinds:
        widest = facts.file.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"]
        own["intermediate_size"] = widest.shape[0]
    if "moe" in kinds:
        own |= facts.sigmoid_experts | {
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "n_shared_experts": keys.integer("expert_shared_count"),
            "moe_shared_expert_intermediate_size": keys.integer(
                "expert_shared_feed_forward_length"
            ),
        }
    return own


def _part(facts: Facts, index: int) -> str:
    """The part of a layer. CetaneError if it has none, or several."""
    parts = [
        part for tensor, part in _PARTS.items() if f"blk.{index}.{tensor}" in facts.file.tensors
    ]
    if len(parts) != 1:
        raise CetaneError(
            f"{facts.file.path}: layer {index} has {' and '.join(parts) or 'no part'}, not one part"
        )
    return parts[0]


def _inner(facts: Facts, unit: int, noun: str) -> int:
    """How often the inner width of a Mamba-2 holds `unit`."""
    width = facts.keys.integer("ssm.inner_size")
    if width % unit:
        raise facts.keys.bad("ssm.inner_size", f"a multiple of {unit} {noun}", width)
    return width // unit


def _mamba(facts: Facts) -> dict[str, Any]:
    """The sizes of Mamba-2."""
    keys, heads = facts.keys, facts.keys.integer("ssm.time_step_rank")
    biases = [name for name in facts.file.tensors if name.endswith("ssm_conv1d.bias")]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _inner(facts, heads, "heads"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": bool(biases),
        "mamba_proj_bias": False,
    }
