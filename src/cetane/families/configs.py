"""Checks of a config's numbers: before and after transformers reads it, and as a family does."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol

from cetane.errors import CetaneError
from cetane.files import documentation

KNOWN = documentation("reference/models.md")
"""The page with all models that cetane knows, and their limits."""
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
    "num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step",
    "moe_intermediate_size", "router_hidden_size", "cca_time0", "cca_time1",
    "vocab_size_per_layer_input", "query_pre_attn_scalar", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "intermediate_size_mlp", "attention_chunk_size", "floor_scale", "conv_L_cache",
    "num_dense_layers", "n_group", "topk_group", "moe_num_shared_experts", "moe_layer_interval",
    "num_shared_experts", "shared_intermediate_size", "hidden_size_per_layer_input", "laurel_rank",
    "altup_num_inputs", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head",
    "mamba_d_conv", "n_inner", "ffn_dim", "word_embed_proj_dim", "mamba_num_heads",
    "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel",
    "moe_shared_expert_intermediate_size", "num_heads", "state_size", "rotary_dim", "num_kv_heads",
    "ffn_hidden_size", "time_step_rank", "mamba_dt_rank",
    "mamba_expand",
)  # fmt: skip
"""The keys of configs that hold sizes."""

LEAST = {
    ("afmoe", "num_dense_layers"): 0,
    ("deepseek_v2", "n_shared_experts"): 0,
    ("deepseek_v3", "n_shared_experts"): 0,
    ("dots1", "n_shared_experts"): 0,
    ("gemma3n_text", "altup_num_inputs"): 2,
    ("gemma4_text", "hidden_size_per_layer_input"): 0,
    ("glm4_moe", "n_shared_experts"): 0,
    ("glm4_moe_lite", "n_shared_experts"): 0,
    ("solar_open", "n_shared_experts"): 0,
    ("ernie4_5_moe", "moe_num_shared_experts"): 0,
    ("granitemoehybrid", "intermediate_size"): 0,
    ("granitemoehybrid", "num_experts_per_tok"): 0,
    ("granitemoehybrid", "num_local_experts"): 0,
    ("granitemoe_swa", "shared_intermediate_size"): 0,
    ("granitemoeshared", "shared_intermediate_size"): 0,
    ("lfm2_moe", "num_dense_layers"): 0,
    ("nemotron_h", "moe_shared_expert_intermediate_size"): 0,
    ("qwen3_5_moe_text", "shared_expert_intermediate_size"): 0,
    ("qwen2_moe", "num_experts"): 0,
    ("qwen2_moe", "shared_expert_intermediate_size"): 0,
    ("qwen3_moe", "num_experts"): 0,
    ("qwen3_next", "num_experts"): 0,
    ("qwen3_next", "shared_expert_intermediate_size"): 0,
}
"""The least value of a size of a model type, where it is not 1. No experts mean MLPs, and no shared
ones mean none; without dense layers, all have experts. AltUp has several streams."""
LARGEST = 2**31
"""The limit of every size in a config; no model reaches it."""
LARGEST_HEAD = 1 << 16
"""The limit of an attention head's width, in channels, which is also the width of real tables."""
LARGEST_NUMBERS = {
    "rope_theta": 1e12, "factor": 1e6, "rms_norm_eps": 1.0, "norm_eps": 1.0,
    "layer_norm_eps": 1.0, "norm_epsilon": 1.0, "layer_norm_epsilon": 1.0, "logit_scale": 1e6,
    "final_logit_softcapping": 1e6, "attn_logit_softcapping": 1e6, "clip_qkv": 1e6,
    "swiglu_alpha": 1e4, "swiglu_limit": 1e4, "logits_scaling": 1e6,
    "routed_scaling_factor": 1e6, "route_scale": 1e6, "router_scaling_factor": 1e6,
}  # fmt: skip
"""The limits of numbers in a config, which must also be above zero. Beyond them, tables overflow
and logits change sign."""
MOST = {
    "num_hidden_layers": 1024, "num_experts": 4096, "num_local_experts": 4096,
    "moe_num_experts": 4096, "n_routed_experts": 4096, "num_labels": 100_000, "conv_L_cache": 128,
    "linear_conv_kernel_dim": 128, "mamba_d_conv": 128, "conv_kernel": 128, "cca_time0": 128,
    "cca_time1": 128,
}  # fmt: skip
"""The limits of sizes that become lists or modules, one item for each."""
MOST_MODULES = 2**15
"""The limit of experts in all layers, which take 0.2 ms each. Qwen3.5-397B-A17B has 30,720."""
MALFORMED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError,
)  # fmt: skip
"""The errors that transformers, torch and arithmetic raise for malformed configs."""


NO_JSON = ("Infinity", "-Infinity", "NaN")
"""Numbers that JSON lacks. transformers writes them as `{"__float__": "Infinity"}`."""


def decoded(value: Any) -> Any:
    """A value of config.json, with such numbers as numbers."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in NO_JSON:
        return float(value["__float__"])
    return {key: decoded(one) for key, one in value.items()}


def invalid(kind: str, why: str) -> CetaneError:
    """The error for a config.json that no model of its type `kind` can have."""
    return CetaneError(f"config.json of a {kind} model is not valid: {why}")


def unsupported(kind: str, what: str) -> CetaneError:
    """The error for what a model of the type `kind` may have, and no port can."""
    return CetaneError(
        f"config.json of a {kind} model: {what}, which is not supported",
        f"cetane inspect MODEL shows what else it has; {KNOWN} lists such limits",
    )


def check_counts(kind: str, settings: Mapping[str, Any]) -> None:
    """Raise CetaneError for counts that no model has, before transformers makes lists of them and
    divides by them."""
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        check_value(kind, name, settings.get(name))
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


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The number of a key, or those in its tables, with their names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(key, inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def check_value(kind: str, name: str, value: Any) -> None:
    """Raise CetaneError if no model of the type `kind` can have this value for the key `name`."""
    if name in SIZES and value is not None:
        least = LEAST.get((kind, name), 1)
        for size in value if isinstance(value, list) else [value]:  # some have one for each layer
            if not isinstance(size, int | float) or not least <= size <= LARGEST:
                raise invalid(kind, f"{name} = {size!r}, not from {least} to {LARGEST}")
    for key, number in numbers(name, value):
        limit = LARGEST_NUMBERS.get(key)
        if limit is not None and not 0 < number <= limit:
            raise invalid(kind, f"{key} = {number:g}, not above 0 and up to {limit:g}")


def head_width(kind: str, size: int, heads: int) -> int:
    """The channels of a head, of a residual stream of `size`. CetaneError if they do not divide."""
    if size % heads:
        raise invalid(kind, f"hidden_size = {size} is not a multiple of {heads} heads")
    return size // heads


def check_entries(kind: str, name: str, entries: Sized, count: int) -> None:
    """Raise CetaneError for a list in a config that leaves out some of `count` layers."""
    if len(entries) < count:
        raise invalid(kind, f"{name} has {len(entries)} entries, num_hidden_layers = {count}")


class SizedConfig(Protocol):
    """The fields that every transformers config has."""

    model_type: str
    attribute_map: Mapping[str, str]
    """The config's own names of some common keys."""


class CheckedConfig:
    """A transformers config that checks each value when a family reads it: transformers lets wrong
    ones pass. Keys that no family reads may have any values, as in transformers."""

    def __init__(self, config: SizedConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        check_value(self._config.model_type, name, value)
        return value


def check_sizes(config: SizedConfig) -> None:
    """Raise CetaneError for counts of layers and heads that no model has. transformers lets them
    pass."""
    own = dict(vars(config))  # where layers differ, of those without their own
    own |= {common: own[name] for common, name in config.attribute_map.items() if name in own}
    kind = config.model_type
    check_counts(kind, own | {"num_hidden_layers": getattr(config, "num_hidden_layers", None)})
    query = own.get("num_attention_heads")
    if query is None:  # no layer attends
        return
    kv = own.get("num_key_value_heads", query)
    if kv is None or query % kv:
        raise invalid(
            kind,
            f"num_attention_heads = {query} is not a multiple of num_key_value_heads = {kv}",
        )
