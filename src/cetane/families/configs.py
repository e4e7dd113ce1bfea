"""Checks of a config's numbers, before transformers reads it and after."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from cetane.errors import CetaneError

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings",
    "num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step",
    "moe_intermediate_size", "router_hidden_size", "cca_time0", "cca_time1",
    "vocab_size_per_layer_input", "query_pre_attn_scalar", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "intermediate_size_mlp", "attention_chunk_size", "floor_scale", "conv_L_cache",
)  # fmt: skip
"""The keys of configs that hold sizes."""

LEAST = {
    ("qwen3_moe", "num_local_experts"): 0,
    ("qwen3_next", "num_experts"): 0,
}
"""The least value of a size of a model type, where it is not 1: no experts mean MLPs."""
LARGEST = 2**31
"""The limit of every size in a config; no model reaches it."""
LARGEST_HEAD = 1 << 16
"""The limit of an attention head's width, in channels, which is also the width of real tables."""
LARGEST_NUMBERS = {
    "rope_theta": 1e12, "rope_local_base_freq": 1e12, "factor": 1e6, "rms_norm_eps": 1.0,
    "final_logit_softcapping": 1e6, "attn_logit_softcapping": 1e6, "clip_qkv": 1e6,
    "swiglu_alpha": 1e4, "swiglu_limit": 1e4, "logits_scaling": 1e6,
}  # fmt: skip
"""The limits of numbers in a config, which must also be above zero. Beyond them, tables overflow
and logits change sign."""
MOST = {
    "num_hidden_layers": 1024, "num_experts": 4096, "num_local_experts": 4096,
    "n_routed_experts": 4096, "num_labels": 100_000, "conv_L_cache": 128,
    "linear_conv_kernel_dim": 128, "cca_time0": 128, "cca_time1": 128,
}  # fmt: skip
"""The limits of sizes that become lists or modules, one item for each."""
MOST_MODULES = 2**17
"""The limit of experts in all layers; DeepSeek-V3 has 2**14."""
MALFORMED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError,
)  # fmt: skip
"""The errors that transformers, torch and arithmetic raise for malformed configs."""


def invalid(kind: str, why: str) -> CetaneError:
    """The error for a config.json of a model type that no model of this type has."""
    return CetaneError(f"config.json of a {kind} model is not valid: {why}")


def check_counts(kind: str, settings: Mapping[str, Any]) -> None:
    """Raise CetaneError for counts that no model has, before transformers makes lists of them."""
    counts = {name: settings[name] for name in MOST if isinstance(settings.get(name), int)}
    for name, count in counts.items():
        if count > MOST[name]:
            raise invalid(kind, f"{name} = {count}, more than {MOST[name]}")
    layers = counts.get("num_hidden_layers", 0)
    experts = max((counts[name] for name in counts if name.endswith("experts")), default=0)
    if layers * experts > MOST_MODULES:
        raise invalid(
            kind, f"{layers} layers of {experts} experts, more than {MOST_MODULES} in all"
        )


def numbers(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a config and of its tables, with their names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class SizedConfig(Protocol):
    """The field that every transformers config has."""

    model_type: str


def check_sizes(config: SizedConfig) -> None:
    """Raise CetaneError for sizes that no model has. transformers lets them pass."""
    kind = config.model_type
    for name in SIZES:
        size = vars(config).get(name)  # where layers differ, that of layers without their own
        if size is None:
            continue
        least = LEAST.get((kind, name), 1)
        if not isinstance(size, int | float) or not least <= size <= LARGEST:
            raise invalid(kind, f"{name} = {size!r}, not from {least} to {LARGEST}")
    check_counts(kind, vars(config))
    for name, value in numbers(vars(config)):
        if name in LARGEST_NUMBERS and not 0 < value <= LARGEST_NUMBERS[name]:
            limit = LARGEST_NUMBERS[name]
            raise invalid(kind, f"{name} = {value:g}, not above 0 and up to {limit:g}")
    query, kv = (vars(config)[f"num_{of}_heads"] for of in ("attention", "key_value"))
    if query % kv:
        raise invalid(
            kind,
            f"num_attention_heads = {query} is not a multiple of num_key_value_heads = {kv}",
        )
