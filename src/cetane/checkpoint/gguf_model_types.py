"""What single model types add to the config of a GGUF file, or have otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cetane.checkpoint.gguf_file import GGUFFile
from cetane.checkpoint.gguf_keys import Keys
from cetane.errors import CetaneError

_GEMMA_PERIOD = 6
"""Gemma 3: one layer in six sees all tokens; the others have a rotary base of their own."""
_LOCAL_THETA = 10_000.0
"""The rotary base of Gemma's sliding layers, if the file has none."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""The number of layers of the models of 27B (see `_scores_by`)."""
_SMOLLM3_PERIOD = 4
"""SmolLM3: every fourth layer does not turn queries and keys. Not in the file."""
_COHERE_PERIOD = 4
"""Command R7B: every fourth layer sees all tokens. Not in the file."""
_OLMO_EPS = 1e-5
"""The epsilon of OLMo's norms, which no config has."""
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers for experts weighed by a softmax, and by a sigmoid of each."""
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@dataclass(frozen=True)
class Facts:
    """A file, and what every model type has in its config."""

    file: GGUFFile
    keys: Keys
    config: dict[str, Any]
    rotary_width: int
    """The channels of an attention head that rotate."""

    @property
    def rope(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.config["rope_parameters"]
        return parameters

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def turned_part(self) -> dict[str, Any]:
        """The rotary parameters of heads that rotate in part."""
        return self.rope | {"partial_rotary_factor": self.rotary_width / self.config["head_dim"]}

    def has(self, *tensors: str) -> bool:
        """Whether the file has tensors of the first layer."""
        return all(f"blk.0.{name}" in self.file.tensors for name in tensors)

    def rows(self, tensor: str) -> int:
        """The number of rows of a tensor of the first layer; 0 if it is missing."""
        stored = self.file.tensors.get(f"blk.0.{tensor}")
        return stored.shape[0] if stored is not None and stored.shape else 0

    def windows(self, slides: list[bool]) -> dict[str, Any]:
        """The window of the layers that slide, and the type of every layer."""
        return {
            "sliding_window": self.keys.integer("attention.sliding_window"),
            "layer_types": self.kinds("sliding_attention", "full_attention", slides),
        }

    def kinds(self, first: str, second: str, chosen: list[bool]) -> list[str]:
        """The first kind where a layer is chosen, else the second."""
        return [first if one else second for one in chosen]


Own = Callable[[Facts], dict[str, Any]]
OWN: dict[str, Own] = {}
"""What a model type adds, by its name."""


def of(*model_types: str) -> Callable[[Own], Own]:
    def enter(own: Own) -> Own:
        OWN.update(dict.fromkeys(model_types, own))
        return own

    return enter


@of("hunyuan_v1_dense", "llama", "qwen3")
def _biased(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in facts.file.tensors}


@of("arcee")
def _arcee(facts: Facts) -> dict[str, Any]:
    return _biased(facts) | {"hidden_act": "relu2"}


@of("ernie4_5")
def _ernie(facts: Facts) -> dict[str, Any]:
    return {"use_bias": _biased(facts)["attention_bias"]}


@of("glm", "glm4")
def _glm4(facts: Facts) -> dict[str, Any]:
    return _biased(facts) | {"rope_parameters": facts.turned_part}


@of("cohere")
def _cohere(facts: Facts) -> dict[str, Any]:
    return {"logit_scale": facts.keys.number("logit_scale"), "use_qk_norm": facts.has(
        "attn_q_norm.weight"), "attention_bias": facts.has("attn_q.bias")}  # fmt: skip


@of("cohere2")
def _cohere2(facts: Facts) -> dict[str, Any]:
    """Which layers slide is not in the file; all releases have the same."""
    slides = [(index + 1) % _COHERE_PERIOD != 0 for index in range(facts.layers)]
    return facts.windows(slides) | {"logit_scale": facts.keys.number("logit_scale")}


@of("olmo")
def _olmo_1(facts: Facts) -> dict[str, Any]:
    key = "attention.clamp_kqv"
    _check_epsilon(facts)
    return {"clip_qkv": None if facts.keys.get(key) is None else facts.keys.number(key)}


def _check_epsilon(facts: Facts) -> None:
    """Refuse another epsilon than transformers' OLMo has, whose config has none."""
    value = facts.config["layer_norm_eps"]
    if abs(value - _OLMO_EPS) > 1e-3 * _OLMO_EPS:
        raise facts.keys.bad("attention.layer_norm_epsilon", f"{_OLMO_EPS}", value)


@of("stablelm")
def _stablelm(facts: Facts) -> dict[str, Any]:
    parallel = facts.keys.get("use_parallel_residual")
    return {
        "use_parallel_residual": parallel is not False,
        "use_qkv_bias": facts.has("attn_q.bias"),
        "rope_parameters": facts.turned_part,
    }


@of("starcoder2")
def _starcoder2(facts: Facts) -> dict[str, Any]:
    """The file has no window, and llama.cpp sees all tokens."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": facts.has("attn_q.bias"),
        "sliding_window": None,
    }


@of("phi")
def _phi(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "rope_parameters": facts.turned_part}


@of("nemotron")
def _nemotron(facts: Facts) -> dict[str, Any]:
    biases = {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}
    return biases | {"hidden_act": "relu2", "rope_parameters": facts.turned_part}


@of("jais2")
def _jais2(facts: Facts) -> dict[str, Any]:
    biases = {"attention_bias": facts.has("attn_q.bias"), "mlp_bias": facts.has("ffn_up.bias")}
    return biases | {"hidden_act": "relu2"}


@of("seed_oss")
def _seed(facts: Facts) -> dict[str, Any]:
    return _biased(facts) | {"attention_out_bias": "blk.0.attn_output.bias" in facts.file.tensors}


@of("exaone4")
def _exaone(facts: Facts) -> dict[str, Any]:
    """Where some layers slide, the others give no positions."""
    keys = facts.keys
    if keys.get("attention.sliding_window") is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * facts.layers}
    return facts.windows(keys.sliding_layers(facts.layers))


@of("granite", "granitemoe")
def _granite(facts: Facts) -> dict[str, Any]:
    own = _biased(facts) | {name: facts.keys.number(key) for name, key in _GRANITE.items()}
    shared = facts.keys.optional("expert_shared_feed_forward_length")
    if shared:
        own |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared,
                "architectures": ["GraniteMoeSharedForCausalLM"]}  # fmt: skip
    return own


@of("granitemoehybrid")
def _granite_hybrid(facts: Facts) -> dict[str, Any]:
    """Mamba-2 in the layers without key/value heads. An MLP that all tokens take, with or without
    experts beside it."""
    keys, config = facts.keys, facts.config
    heads = keys.integers("attention.head_count_kv", facts.layers)
    shared = keys.optional("expert_shared_feed_forward_length")
    rotates, width = keys.get("rope.scaling.finetuned"), keys.integer("ssm.inner_size")
    if width % config["hidden_size"]:
        expected = f"a multiple of {config['hidden_size']} channels"
        raise keys.bad("ssm.inner_size", expected, width)
    return {name: keys.number(key) for name, key in _GRANITE.items()} | _mamba(facts) | {
        "layer_types": facts.kinds("attention", "mamba", [count > 0 for count in heads]),
        "mamba_expand": width // config["hidden_size"],
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": keys.optional("expert_count"),
        "shared_intermediate_size": shared or config["intermediate_size"],
        "attention_bias": False,
    }  # fmt: skip


def _mamba(facts: Facts) -> dict[str, Any]:
    """The sizes of Mamba-2."""
    keys, heads = facts.keys, facts.keys.integer("ssm.time_step_rank")
    width = keys.integer("ssm.inner_size")
    if width % heads:
        raise keys.bad("ssm.inner_size", f"a multiple of {heads} heads", width)
    biases = [name for name in facts.file.tensors if name.endswith("ssm_conv1d.bias")]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": bool(biases),
        "mamba_proj_bias": False,
    }


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


@of("smollm3")
def _smollm3(facts: Facts) -> dict[str, Any]:
    return _biased(facts) | {"no_rope_layer_interval": _SMOLLM3_PERIOD}


@of("ministral3")
def _ministral3(facts: Facts) -> dict[str, Any]:
    """Beyond the table's positions, queries have a factor. A Mistral of the same architecture has
    no such factor."""
    rope = facts.rope | _yarn_scales(facts, 1.0)
    if facts.keys.get("attention.temperature_scale") is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                "sliding_window": None, "rope_parameters": rope}  # fmt: skip
    own = {"llama_4_scaling_beta": facts.keys.number("attention.temperature_scale")}
    return {"rope_parameters": rope | own}


def _yarn_scales(facts: Facts, unit: float) -> dict[str, Any]:
    """The two scales of yarn, equal in all releases. The file has one number: `unit` times them.

    The converter writes 0 for a plain yarn, without such scales."""
    key = "rope.scaling.yarn_log_multiplier"
    value = facts.keys.get(key)
    if value is None or (type(value) is float and value == 0.0):
        return {}
    scale = round(facts.keys.number(key) / unit, 6)  # the file has it in fp32
    return {"mscale": scale, "mscale_all_dim": scale}


@of("qwen3_moe")
def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    """That weights are divided by their sum is not in the file; all releases do it."""
    inner = facts.keys.integer("expert_feed_forward_length")
    return {"moe_intermediate_size": inner, "norm_topk_prob": True}


@of("qwen2_moe")
def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    """That weights are not divided by their sum is not in the file; no release does it."""
    keys = facts.keys
    return {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in facts.file.tensors,
    }


@of("phi3")
def _phi3(facts: Facts) -> dict[str, Any]:
    """The part of each head that turns, its two tables, and the window."""
    return {
        "rope_parameters": facts.turned_part | _two_tables(facts),
        "original_max_position_embeddings": _trained_context(facts),
        "sliding_window": facts.keys.optional("attention.sliding_window") or None,  # 0 is none
    }


def _trained_context(facts: Facts) -> int:
    key = "rope.scaling.original_context_length"
    return facts.keys.integer(key, facts.config["max_position_embeddings"])


def _two_tables(facts: Facts) -> dict[str, Any]:
    """The factors of short and of long texts, if the file has them."""
    file, trained = facts.file, _trained_context(facts)
    if "rope_factors_long.weight" not in file.tensors:
        return {}
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        "factor": facts.config["max_position_embeddings"] / trained,
    }
    for name in ("short", "long"):
        stored = file.tensors.get(f"rope_factors_{name}.weight")
        if stored is None:
            raise CetaneError(f"{file.path} has no rope_factors_{name}.weight")
        if stored.dtype != "F32" or stored.shape != (facts.rotary_width // 2,):
            raise CetaneError(
                f"{file.path}: rope_factors_{name}.weight is {stored.dtype} of {stored.shape}"
            )
        rope[f"{name}_factor"] = np.frombuffer(stored.read(), np.float32).tolist()
    return rope


@of("olmo2")
def _olmo(facts: Facts) -> dict[str, Any]:
    """OLMo 3 is an "olmo2" with windows. Its sliding layers turn as if contexts were short."""
    keys, rope = facts.keys, facts.rope
    if keys.get("attention.sliding_window") is None:
        return {}
    local = keys.number("rope.freq_base_swa", rope["rope_theta"])
    return facts.windows(keys.sliding_layers(facts.layers)) | {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": rope,
        },
    }


def _check_one_base(facts: Facts) -> None:
    """Refuse another rotary base of sliding layers: llama.cpp reads it, transformers has none."""
    key, base = "rope.freq_base_swa", facts.rope["rope_theta"]
    if facts.keys.number(key, base) != base:
        expected = f"{base}, the base of all layers of this architecture"
        raise facts.keys.bad(key, expected, facts.keys.get(key))


@of("gpt_oss")
def _gpt_oss(facts: Facts) -> dict[str, Any]:
    """The window, and what the only releases have: biases, and a yarn that is not rounded."""
    _check_one_base(facts)
    return {
        "intermediate_size": facts.keys.integer("expert_feed_forward_length"),
        "sliding_window": facts.keys.integer("attention.sliding_window"),
        "attention_bias": True,
        "rope_parameters": facts.rope | {"truncate": False},
    }


@of("lfm2")
def _lfm2(facts: Facts) -> dict[str, Any]:
    return _convolved(facts) | {"block_auto_adjust_ff_dim": False}


def _convolved(facts: Facts) -> dict[str, Any]:
    """A layer without key/value heads is a convolution."""
    heads = facts.keys.integers("attention.head_count_kv", facts.layers)
    return {
        "layer_types": facts.kinds("full_attention", "conv", [count > 0 for count in heads]),
        "norm_eps": facts.config["rms_norm_eps"],
        "conv_L_cache": facts.keys.integer("shortconv.l_cache"),
    }


@of("lfm2_moe")
def _lfm2_moe(facts: Facts) -> dict[str, Any]:
    """Weights of experts are sigmoids with a bias each, and divided by their sum: all releases have
    both, and llama.cpp computes nothing else."""
    keys = facts.keys
    gating = keys.integer("expert_gating_func")
    if gating != _SIGMOID:
        raise keys.bad("expert_gating_func", f"{_SIGMOID}, which alone is supported", gating)
    return _convolved(facts) | {
        "num_dense_layers": keys.optional("leading_dense_block_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


@of("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
def _delta(facts: Facts) -> dict[str, Any]:
    """The delta rule, the layers that attend instead, and experts where there are some."""
    keys, heads = facts.keys, facts.keys.integer("ssm.time_step_rank")
    width, period = keys.integer("ssm.inner_size"), keys.integer("full_attention_interval")
    if width % heads:
        raise keys.bad("ssm.inner_size", f"a multiple of {heads} heads", width)
    if heads % keys.integer("ssm.group_count"):
        raise keys.bad("ssm.group_count", f"a divisor of {heads}", keys.get("ssm.group_count"))
    attends = [(index + 1) % period == 0 for index in range(facts.layers)]
    own: dict[str, Any] = {
        "layer_types": facts.kinds("full_attention", "linear_attention", attends),
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


@of("gpt2")
def _gpt2(facts: Facts) -> dict[str, Any]:
    return {"n_inner": facts.config["intermediate_size"]}


@of("gpt_neox")
def _gpt_neox(facts: Facts) -> dict[str, Any]:
    """A GELU is not in the file; all releases have it."""
    return {
        "hidden_act": "gelu",
        "use_parallel_residual": facts.keys.get("use_parallel_residual") is not False,
        "attention_bias": facts.has("attn_qkv.bias"),
        "rope_parameters": facts.turned_part,
    }


@of("minicpm3")
def _minicpm3(facts: Facts) -> dict[str, Any]:
    """The file lacks the three factors of its only release, as llama.cpp's code has them."""
    keys, rotary = facts.keys, facts.rotary_width
    width, rank = keys.integer("attention.key_length"), keys.integer("attention.kv_lora_rank")
    heads, rows = facts.config["num_attention_heads"], facts.rows("attn_kv_b.weight")
    plain = width - rotary
    if plain <= 0 or rows % heads or rows // heads <= plain:
        raise keys.bad("attention.key_length", f"of {rows} rows for {heads} heads", width)
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": plain,
        "v_head_dim": rows // heads - plain,
        "head_dim": rotary,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": facts.rope | _two_tables(facts),
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


def _of_deepseek_v3(facts: Facts) -> dict[str, Any]:
    """What DeepSeek-V3 adds: experts weighed by a sigmoid of each, in groups; or no experts."""
    keys = facts.keys
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
    for key, plain in (("expert_gating_func", _SOFTMAX), ("expert_group_count", 1),
                       ("expert_weights_norm", False)):  # fmt: skip
        value = keys.get(key)
        if value is not None and (type(value) is not type(plain) or value != plain):
            raise keys.bad(key, f"{plain}, which alone is supported", value)
    return {
        "first_k_dense_replace": keys.optional("leading_dense_block_count"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "topk_method": "greedy",
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
        "rope_parameters": facts.rope | _yarn_scales(facts, 0.1),
    } | (_of_deepseek_v3(facts) if third else _plain_experts(facts))


@of("gemma")
def _gemma(facts: Facts) -> dict[str, Any]:
    """Its config calls the activation otherwise than those of later Gemmas do."""
    return {"hidden_act": facts.config["hidden_activation"]}


@of("gemma2")
def _gemma2(facts: Facts) -> dict[str, Any]:
    _check_one_base(facts)
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


def _bounded(keys: Keys) -> dict[str, Any]:
    """The bound of logits, if there is one."""
    key = "final_logit_softcapping"
    return {} if keys.get(key) is None else {key: keys.number(key)}


@of("gemma4_text")
def _gemma4(facts: Facts) -> dict[str, Any]:
    """Layers of two widths, the last of which may share keys and values."""
    keys, config, tensors = facts.keys, facts.config, facts.file.tensors
    slides = keys.sliding_layers(facts.layers)
    heads = keys.integers("attention.head_count_kv", facts.layers)
    inner = keys.integers("feed_forward_length", facts.layers)
    shared = keys.optional("attention.shared_kv_layers")
    if shared >= facts.layers:
        raise keys.bad("attention.shared_kv_layers", f"less than {facts.layers}", shared)
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
