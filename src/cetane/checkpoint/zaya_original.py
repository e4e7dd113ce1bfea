"""Zyphra's own form of ZAYA, mapped to transformers' form: two blocks become one layer.

The keys, names and meanings are those of Zyphra's forks of transformers and vLLM. The map is that
of transformers' own converter, which it does not ship (huggingface/transformers#45862). Tensors
keep their values; they are only renamed, and experts are stacked.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from cetane.checkpoint.stored_tensors import StackedTensor, StoredTensor
from cetane.errors import CetaneError

# Any of these keys marks the original form; transformers' form has none of them.
_MARKS = ("cca", "zaya_layers", "zaya_mlp_expansion", "ffn_hidden_size", "ffn_hidden_size_list")

# transformers supports only these values. A key that is absent or null has this value.
_ONLY = {
    "activation_func": "swiglu",
    "add_bias_linear": False,
    "cca": True,
    "clamp_temp": False,
    "gated_linear_unit": True,
    "layer_types": None,  # the original says it by swa_layers
    "lm_head_bias": False,
    "moe_router_topk": 1,
    "normalization": "RMSNorm",
    "num_experts_per_tok": 1,
    "rope_scaling": False,
    "scale_residual_merge": True,
    "zaya_use_eda": True,
    "zaya_use_mod": True,
}

_MOST_BLOCKS = 10_000  # a hostile config must not make us allocate more
_ATTENTION, _EXPERTS = 0, 1  # blocks alternate, attention first

_MODULES = (
    {
        "input_norm": "input_layernorm",
        "self_attn.o_proj": "self_attn.o_proj",
        "self_attn.qkv": "self_attn.qk_norm",  # of its own it has only `temp`
        "self_attn.qkv.conv_qk.0": "self_attn.qkv_proj.conv_qk_depthwise",
        "self_attn.qkv.conv_qk.1": "self_attn.qkv_proj.conv_qk_grouped",
        "self_attn.qkv.linear_k": "self_attn.qkv_proj.k_proj",
        "self_attn.qkv.linear_q": "self_attn.qkv_proj.q_proj",
        "self_attn.qkv.val_proj1": "self_attn.qkv_proj.v_proj_current",
        "self_attn.qkv.val_proj2": "self_attn.qkv_proj.v_proj_delayed",
    },
    {
        "input_norm": "post_attention_layernorm",
        "zaya_block.router": "mlp.gate",
        "zaya_block.router.down_proj": "mlp.gate.down_proj",
        "zaya_block.router.rmsnorm_eda": "mlp.gate.router_mlp.norm",
        "zaya_block.router.router_mlp.0": "mlp.gate.router_mlp.fc1",
        "zaya_block.router.router_mlp.2": "mlp.gate.router_mlp.fc2",
        "zaya_block.router.router_mlp.4": "mlp.gate.router_mlp.out_proj",
    },
)
_PARAMETERS = {"weight", "bias", "temp", "balancing_biases", "router_states_scale"}
_SCALES = {"hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"}
_STACKS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}  # fc1: gate rows, then up rows
_OUTSIDE = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}

_INDEX = "(0|[1-9][0-9]{0,5})"
_IN_BLOCK = re.compile(rf"model\.layers\.{_INDEX}\.(.+)\.(\w+)")
_EXPERT = re.compile(rf"zaya_block\.experts\.local_experts\.{_INDEX}\.(linear_fc[12])")


def is_original(config: dict[str, Any]) -> bool:
    """Whether this config.json is Zyphra's own."""
    return config.get("model_type") == "zaya" and any(key in config for key in _MARKS)


def hf_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The arguments of `transformers.AutoConfig.for_model` for the same model.

    `path` is the file of `config`. Raises CetaneError with the key that is missing, contradicts
    another, or asks for something that transformers does not support.
    """
    keys = _Keys(config, path)
    for key, only in _ONLY.items():
        if config.get(key) is not None and config[key] != only:
            raise keys.bad(key, f"is {config[key]!r}, and only {only!r} is supported")
    ffn = keys.integer("ffn_hidden_size_list", "ffn_hidden_size", block=_EXPERTS)
    if ffn % 2:
        raise keys.bad("ffn_hidden_size", f"is {ffn}, which is odd, so gate and up cannot share it")
    heads_key = "num_attention_heads" if keys.absent("cca_num_q_heads") else "cca_num_q_heads"
    heads = keys.integer(heads_key, block=_ATTENTION)
    kv_heads = keys.integer(
        "num_query_groups_list", "num_query_groups", "num_key_value_heads", block=_ATTENTION
    )
    if heads % kv_heads:
        raise keys.bad(heads_key, f"is {heads}, not a multiple of {kv_heads} key/value heads")
    return {
        "model_type": "zaya",
        "architectures": ["ZayaForCausalLM"],
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "hidden_act": "silu",
        "num_hidden_layers": keys.blocks // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(keys),
        "attention_bias": keys.flag("attention_bias", default=False),
        "cca_time0": keys.integer("cca_time0", default=2),
        "cca_time1": keys.integer("cca_time1", default=2),
        "num_experts": keys.integer("zaya_layers", "num_experts", block=_EXPERTS),
        "num_experts_per_tok": 1,
        "moe_intermediate_size": ffn // 2,
        "router_hidden_size": keys.integer(
            "zaya_mlp_expansion", "router_hidden_size", block=_EXPERTS
        ),
        "rms_norm_eps": keys.number("norm_epsilon", "rms_norm_eps"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", default=True),
        **_layers(keys),
        **{key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def hf_tensors(
    tensors: dict[str, StoredTensor], config: dict[str, Any], path: Path
) -> dict[str, StoredTensor]:
    """The tensors by transformers' names, without those that it has no place for.

    `config` comes from `hf_config`, `path` is its file. A stack without one of its experts is left
    out, so that one shard can be opened alone. Raises CetaneError for a block or an expert beyond
    the config's numbers, and for experts of a stack that differ.
    """
    renamed: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, str]] = defaultdict(dict)
    blocks = 2 * config["num_hidden_layers"]
    for name, tensor in tensors.items():
        target = _OUTSIDE.get(name)
        if name.startswith("model.res_scale."):  # as before a block, after the last one
            target = _scale(blocks, "res_scale", name.removeprefix("model.res_scale."))
        elif match := _IN_BLOCK.fullmatch(name):
            block, module, parameter = int(match[1]), match[2], match[3]
            if block >= blocks:
                raise CetaneError(f"{path} describes {blocks} blocks, but there is {name!r}")
            expert = _EXPERT.fullmatch(module) if block % 2 == _EXPERTS else None
            if expert is not None and parameter == "weight":
                stack = f"model.layers.{block // 2}.mlp.experts.{_STACKS[expert[2]]}"
                stacks[stack][int(expert[1])] = name
            target = _scale(block, module, parameter) or _parameter(block, module, parameter)
        if target is not None:
            renamed[target] = tensor
    if config["tie_word_embeddings"]:
        renamed.pop("lm_head.weight", None)

    for stack, names in stacks.items():
        parts = {expert: tensors[name] for expert, name in sorted(names.items())}
        _check_stack(names, parts, config["num_experts"], path)
        if len(parts) == config["num_experts"]:
            renamed[stack] = StackedTensor.stack(tuple(parts.values()))
    return renamed


def _check_stack(
    names: dict[int, str], parts: dict[int, StoredTensor], experts: int, path: Path
) -> None:
    first = min(parts)
    for expert, part in parts.items():
        if expert >= experts:
            raise CetaneError(f"{path} describes {experts} experts, but there is {names[expert]!r}")
        if (part.shape, part.dtype) != (parts[first].shape, parts[first].dtype):
            raise CetaneError(
                f"{part.file}: tensor {names[expert]!r} is {part.dtype} of shape {part.shape}, "
                f"but {names[first]!r} is {parts[first].dtype} of {parts[first].shape}"
            )


def _scale(block: int, module: str, parameter: str) -> str | None:
    """The name of the residual scaling at the start of `block`: the end of the layer before."""
    if module != "res_scale" or parameter not in _SCALES:
        return None
    if block == 0:  # no residual comes before it
        return f"model.input_{parameter}" if parameter.startswith("hidden_states_") else None
    place = "post_attention" if block % 2 else "post_mlp"
    return f"model.layers.{(block - 1) // 2}.{place}_residual_scale.{parameter}"


def _parameter(block: int, module: str, parameter: str) -> str | None:
    target = _MODULES[block % 2].get(module)
    if target is None or parameter not in _PARAMETERS:
        return None
    return f"model.layers.{block // 2}.{target}.{parameter}"


def _head_dim(keys: _Keys) -> int:
    if not (keys.absent("head_dim") and keys.absent("kv_channels")):
        return keys.integer("head_dim", "kv_channels")
    # Zyphra's class computes it from the number of heads without CCA's compression.
    if keys.absent("cca_num_q_heads"):
        raise keys.bad("head_dim", "is missing")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if hidden % heads:
        raise keys.bad("num_attention_heads", f"is {heads}, which does not divide {hidden}")
    return hidden // heads


def _layers(keys: _Keys) -> dict[str, Any]:
    """The config entries of each layer's window and rotary embedding."""
    windows = keys.windows()
    sizes = {window for window in windows if window}
    if len(sizes) > 1:
        raise keys.bad("swa_layers", f"holds windows of different sizes: {sorted(sizes)}")
    # The original does not count the token itself; transformers does.
    window = sizes.pop() + 1 if sizes else None
    if not keys.absent("sliding_window") and keys.integer("sliding_window") != window:
        raise keys.bad("sliding_window", f"is not {window}, as swa_layers make it")
    bases = {"hybrid": keys.number("rope_theta", "rotary_base")}
    if window is not None:
        bases["hybrid_sliding"] = keys.number("swa_rotary_base")
    part = keys.number("partial_rotary_factor", "rope_pct", default=0.5)
    return {
        "layer_types": ["hybrid_sliding" if window else "hybrid" for window in windows],
        "sliding_window": window,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}
            for kind, base in bases.items()
        },
    }


class _Keys:
    """Typed access to the original config, whose values may be lists with an entry per block."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self._config = config
        self._path = path
        # If both are there, num_hidden_layers may be an unused default.
        key = "num_hidden_layers" if self.absent("zaya_layers") else "zaya_layers"
        pattern = config.get("zaya_layers")
        if pattern is None:
            self.blocks = self.integer(key)
        elif not isinstance(pattern, list) or any(kind != "a" for kind in pattern[_ATTENTION::2]):
            raise self.bad(key, "does not alternate attention ('a') and experts")
        else:
            self.blocks = len(pattern)
        if self.blocks % 2 or not 0 < self.blocks <= _MOST_BLOCKS:
            raise self.bad(
                key, f"announces {self.blocks} blocks, not an even number up to {_MOST_BLOCKS}"
            )

    def absent(self, key: str) -> bool:
        return self._config.get(key) is None

    def integer(self, *keys: str, block: int | None = None, default: int | None = None) -> int:
        """The positive integer on which all present `keys` agree.

        With `block`, only the entries of that kind of block are read from a list.
        """
        value: int = self._one(keys, block, default, (int,), "integer")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        return float(self._one(keys, None, default, (int, float), "number"))

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.absent(key) else self._config[key]
        if type(value) is not bool:
            raise self.bad(key, f"is {value!r}, neither true nor false")
        return value

    def windows(self) -> list[int]:
        """The number of earlier tokens that each layer sees; 0 for all."""
        if self.absent("swa_layers"):
            return [0] * (self.blocks // 2)
        values = [value or 0 for value in self._values("swa_layers", _ATTENTION)]
        if len(values) != self.blocks // 2 or any(type(v) is not int or v < 0 for v in values):
            raise self.bad("swa_layers", "is not a list of window sizes, one per block")
        return values

    def bad(self, key: str, why: str) -> CetaneError:
        return CetaneError(f"{self._path}: {key} {why}")

    def _values(self, key: str, block: int | None) -> list[Any]:
        value = self._config.get(key)
        if value is None:
            return []
        if block is None or not isinstance(value, list):
            return [value]
        if len(value) < self.blocks:
            raise self.bad(key, f"has {len(value)} entries for {self.blocks} blocks")
        return value[block : self.blocks : 2]

    def _one(
        self,
        keys: tuple[str, ...],
        block: int | None,
        default: Any,
        types: tuple[type, ...],
        noun: str,
    ) -> Any:
        values: dict[Any, str] = {}
        for key in keys:
            for value in self._values(key, block):
                if type(value) not in types or not 0 < value <= sys.float_info.max:
                    raise self.bad(key, f"holds {value!r}, not a positive {noun}")
                values.setdefault(value, key)
        if len(values) > 1:
            (one, key), (other, other_key) = list(values.items())[:2]
            raise self.bad(other_key, f"holds {other}, but {key} holds {one}")
        if not values and default is None:
            raise self.bad(keys[0], "is missing")
        return next(iter(values), default)
