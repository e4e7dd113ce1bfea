"""What dense models add to the config of a GGUF file, or have otherwise."""

from __future__ import annotations

from typing import Any

from cetane.checkpoint.gguf.model_types.facts import (
    Facts,
    check_one_base,
    of,
    trained_context,
    two_tables,
    yarn_scales,
)
from cetane.errors import CetaneError

_SMOLLM3_PERIOD = 4
"""SmolLM3: every fourth layer does not turn queries and keys. Not in the file."""
_COHERE_PERIOD = 4
"""Command R7B: every fourth layer sees all tokens. Not in the file."""
_OLMO_EPS = 1e-5
"""The epsilon of OLMo's norms, which no config has."""


@of("hunyuan_v1_dense", "llama", "qwen3")
def _biased(facts: Facts) -> dict[str, Any]:
    return facts.biased


@of("arcee")
def _arcee(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"hidden_act": "relu2"}


@of("ernie4_5")
def _ernie(facts: Facts) -> dict[str, Any]:
    return {"use_bias": facts.biased["attention_bias"]}


@of("glm", "glm4")
def _glm4(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"rope_parameters": facts.turned_part}


@of("seed_oss")
def _seed(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"attention_out_bias": facts.has("attn_output.bias")}


@of("smollm3")
def _smollm3(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"no_rope_layer_interval": _SMOLLM3_PERIOD}


@of("cohere")
def _cohere(facts: Facts) -> dict[str, Any]:
    own = {"logit_scale": facts.keys.number("logit_scale")}
    return facts.biased | own | {"use_qk_norm": facts.has("attn_q_norm.weight")}


@of("cohere2")
def _cohere2(facts: Facts) -> dict[str, Any]:
    """Which layers slide is not in the file; all releases have the same."""
    check_one_base(facts)
    slides = [(index + 1) % _COHERE_PERIOD != 0 for index in range(facts.layers)]
    return facts.windows(slides) | {"logit_scale": facts.keys.number("logit_scale")}


@of("exaone4")
def _exaone(facts: Facts) -> dict[str, Any]:
    """Where some layers slide, the others give no positions."""
    keys = facts.keys
    if keys.get("attention.sliding_window") is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * facts.layers}
    check_one_base(facts)
    return facts.windows(keys.sliding_layers(facts.layers))


@of("olmo")
def _olmo_1(facts: Facts) -> dict[str, Any]:
    """transformers' norms have one epsilon, which no config has: another is refused."""
    keys, value = facts.keys, facts.config["layer_norm_eps"]
    if abs(value - _OLMO_EPS) > 1e-3 * _OLMO_EPS:
        raise keys.bad("attention.layer_norm_epsilon", f"{_OLMO_EPS}", value)
    key = "attention.clamp_kqv"
    return {"clip_qkv": None if keys.get(key) is None else keys.number(key)}


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


@of("gpt2", "gpt_bigcode")
def _gpt2(facts: Facts) -> dict[str, Any]:
    """The converter writes four times the width, whatever the MLPs have."""
    return {"n_inner": facts.rows("ffn_up.weight")}


@of("gpt_neox")
def _gpt_neox(facts: Facts) -> dict[str, Any]:
    """A GELU is not in the file; all releases have it."""
    return {
        "hidden_act": "gelu",
        "use_parallel_residual": facts.keys.get("use_parallel_residual") is not False,
        "attention_bias": facts.has("attn_qkv.bias"),
        "rope_parameters": facts.turned_part,
    }


@of("jais2")
def _jais2(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"mlp_bias": facts.has("ffn_up.bias"), "hidden_act": "relu2"}


@of("minicpm3")
def _minicpm3(facts: Facts) -> dict[str, Any]:
    """The file lacks the three factors of its only release, as llama.cpp's code has them."""
    keys, rotary, width = facts.keys, facts.rotary_width, facts.config["head_dim"]
    heads, rows = facts.config["num_attention_heads"], facts.rows("attn_kv_b.weight")
    plain = width - rotary
    if plain <= 0 or rows % heads or rows // heads <= plain:
        raise keys.bad("attention.key_length", f"of {rows} rows for {heads} heads", width)
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": plain,
        "v_head_dim": rows // heads - plain,
        "head_dim": rotary,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": facts.rope | two_tables(facts),
    }


@of("ministral3")
def _ministral3(facts: Facts) -> dict[str, Any]:
    """Beyond the table's positions, queries have a factor. A Mistral of the same architecture has
    no such factor."""
    rope = facts.rope | yarn_scales(facts, 1.0)
    if facts.keys.get("attention.temperature_scale") is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                "sliding_window": None, "rope_parameters": rope}  # fmt: skip
    own = {"llama_4_scaling_beta": facts.keys.number("attention.temperature_scale")}
    return {"rope_parameters": rope | own}


@of("nemotron")
def _nemotron(facts: Facts) -> dict[str, Any]:
    return _jais2(facts) | {"rope_parameters": facts.turned_part}


@of("phi")
def _phi(facts: Facts) -> dict[str, Any]:
    """The converter writes the sizes of Phi-2, whatever the matrices have."""
    return {
        "intermediate_size": facts.rows("ffn_up.weight"),
        "num_key_value_heads": facts.rows("attn_k.weight") // facts.config["head_dim"],
        "hidden_act": "gelu_new",
        "rope_parameters": facts.turned_part,
    }


@of("phi3")
def _phi3(facts: Facts) -> dict[str, Any]:
    """The part of each head that turns, its two tables, and the window."""
    return {
        "rope_parameters": facts.turned_part | two_tables(facts),
        "original_max_position_embeddings": trained_context(facts),
        "sliding_window": facts.keys.optional("attention.sliding_window") or None,  # 0 is none
    }


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


@of("apertus")
def _apertus(facts: Facts) -> dict[str, Any]:
    return facts.biased | {"hidden_act": "xielu"}


@of("falcon")
def _falcon(facts: Facts) -> dict[str, Any]:
    """Heads with one key for all, or in groups: then with two norms beside each other, or one."""
    keys, config, groups = facts.keys, facts.config, facts.config["num_key_value_heads"]
    norms = 2 if facts.has("attn_norm_2.weight") else 1
    if norms == 1 and groups > 1 and keys.get("rope.freq_base") is None:
        raise CetaneError(
            f"{facts.file.path} names no rotary base, and Falcon 2's is not llama.cpp's default",
            "use the model's safetensors",
        )
    return {
        "new_decoder_architecture": norms == 2 or groups > 1,
        "num_ln_in_parallel_attn": norms,
        "num_kv_heads": groups,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "activation": "gelu",
        "ffn_hidden_size": facts.rows("ffn_up.weight") or config["intermediate_size"],
    }
