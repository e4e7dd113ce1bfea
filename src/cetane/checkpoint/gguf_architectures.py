"""The names and orders that llama.cpp's converter gives each architecture, as data.

Source: llama.cpp's conversion scripts and gguf-py's tensor_mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cetane.checkpoint import gguf_layouts as layouts
from cetane.checkpoint.gguf_layouts import TensorRule

Config = Mapping[str, Any]
Names = dict[str, str]
"""Hugging Face's names, by GGUF's."""


def _weights(modules: Names) -> Names:
    """The names of the weights of some modules."""
    return {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in modules.items()}


_TOP = _weights(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_QKV = _weights(
    {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
)
_ATTENTION = _QKV | _weights({"attn_output": "self_attn.o_proj"})
_QK_NORMS = _weights({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_NORMS_BEFORE = _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
_NORMS_AFTER = _weights(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GEMMA_NORMS = _NORMS_AFTER | _weights(
    {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
)
# What these models call post_attention_layernorm is llama.cpp's post_attention_norm.
_POST_NORMS = _weights(
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
)
_MLP = _weights({"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
_UNGATED = _weights({"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
_HUNYUAN_NORMS = _weights(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
_GLM4 = _ATTENTION | _weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)


def _experts(home: str, router: str = "gate") -> Names:
    """The names of a router and of experts, in a part of the layer."""
    return _weights(
        {
            "ffn_gate_inp": f"{home}.{router}",
            "ffn_gate_exps": f"{home}.experts.gate_proj",
            "ffn_up_exps": f"{home}.experts.up_proj",
            "ffn_down_exps": f"{home}.experts.down_proj",
        }
    )


_EXPERTS = _experts("mlp")
_FUSED = _weights(
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_DELTA = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"} | _weights(
    {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
_GPT_OSS = (
    _ATTENTION
    | _EXPERTS
    | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.weight": "mlp.router.weight"}
    | _weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
)
_LLAMA = _ATTENTION | _NORMS_BEFORE | _MLP
_MIXTURE = _ATTENTION | _NORMS_BEFORE | _EXPERTS

_BIASED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "router",
    "experts.gate_proj", "experts.up_proj", "experts.down_proj",
)  # fmt: skip
"""The modules that may have biases."""


def _shared(name: str) -> Names:
    """The names of the expert that all tokens share; `name` is Hugging Face's for it."""
    return _weights(
        {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}
    )


_SHARED = _shared("shared_expert") | _weights({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
"""Qwen's expert that all tokens share."""


def _lfm2(config: Config, index: int) -> Names:
    modules = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    if index < config.get("num_dense_layers", config["num_hidden_layers"]):
        parts = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
        modules |= {theirs: f"feed_forward.{ours}" for theirs, ours in parts.items()}
    if config["layer_types"][index] == "conv":
        parts = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
        return _weights(modules | parts)
    norms = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    return _QKV | _weights(modules | norms | {"attn_output": "self_attn.out_proj"})


def _lfm2_mixture(config: Config, index: int) -> Names:
    names = _lfm2(config, index)
    if index < config["num_dense_layers"]:
        return names
    return names | _experts("feed_forward") | {"exp_probs_b.bias": "feed_forward.expert_bias"}


def _mixer(config: Config, index: int) -> Names:
    """The delta rule or attention of a Qwen3-Next or Qwen3.5."""
    if config["layer_types"][index] == "full_attention":
        return _POST_NORMS | _ATTENTION | _QK_NORMS
    if config["model_type"] == "qwen3_next":
        return _POST_NORMS | _DELTA | _weights({"ssm_ba": "linear_attn.in_proj_ba"})
    rates = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
    return _POST_NORMS | _DELTA | _weights(rates)


def _qwen35(config: Config, index: int) -> Names:
    return _mixer(config, index) | _MLP


def _qwen_mixture(config: Config, index: int) -> Names:
    return _mixer(config, index) | _EXPERTS | _SHARED


def _deepseek2(config: Config, index: int) -> Names:
    latent = {
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
    }
    if config["q_lora_rank"] is None:
        latent["attn_q"] = "self_attn.q_proj"
    else:
        latent |= {
            "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
        }  # fmt: skip
    dense = index < config["first_k_dense_replace"]
    behind = _MLP if dense else _EXPERTS | _shared("shared_experts")
    return _NORMS_BEFORE | _weights(latent) | behind


def _gemma4(config: Config, index: int) -> Names:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    names = _GEMMA_NORMS | _MLP | {"layer_output_scale.weight": "layer_scalar"}
    if config["hidden_size_per_layer_input"]:
        names |= _weights(
            {
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
            }
        )
    attention = _ATTENTION | _QK_NORMS
    absent = ("attn_k.", "attn_v.", "attn_k_norm.") if index >= layers - shared else ()
    if config["attention_k_eq_v"] and config["layer_types"][index] == "full_attention":
        absent = (*absent, "attn_v.")
    return names | {k: v for k, v in attention.items() if not k.startswith(absent)}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str  # Hugging Face's
    model_class: str
    layer: Names | Callable[[Config, int], Names]
    """The names of a layer; a function where layers differ."""
    rules: tuple[TensorRule, ...] = ()
    """How to make the tensors that the file keeps in another form, or in several pieces."""
    top: Names = field(default_factory=lambda: _TOP)
    """The names of what is in no layer."""

    def tensor_names(self, config: Config) -> tuple[Names, Names]:
        """Hugging Face's names by GGUF's: of all weights, and of biases that there may be."""
        weights = dict(self.top)
        if config.get("hidden_size_per_layer_input"):
            weights |= _PER_LAYER
        for index in range(config["num_hidden_layers"]):
            own = self.layer if isinstance(self.layer, dict) else self.layer(config, index)
            weights |= {
                f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}"
                for theirs, ours in own.items()
            }
        biases = {
            f"{theirs.removesuffix('.weight')}.bias": f"{module}.bias"
            for theirs, ours in weights.items()
            if (module := ours.removesuffix(".weight")).endswith(_BIASED)
        }
        return weights, biases


_PER_LAYER = _weights(
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
_LFM2_TOP = _weights(
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
     "output": "lm_head"}
)  # fmt: skip

ARCHITECTURES = {
    # Mistral is "llama" to llama.cpp; its modules and its config are the same.
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORMS),
    "granite": Architecture("granite", "GraniteForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _ATTENTION | _NORMS_BEFORE | _experts("block_sparse_moe", "router"),
        (*layouts.INTERLEAVED, *layouts.EXPERTS),
    ),
    "arcee": Architecture(
        "arcee", "ArceeForCausalLM", _ATTENTION | _NORMS_BEFORE | _UNGATED, layouts.INTERLEAVED
    ),
    # Hugging Face's rows are interleaved too, so nothing changes on the way.
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _LLAMA),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _GLM4),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _LLAMA | _HUNYUAN_NORMS
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _ATTENTION | _POST_NORMS | _MLP),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM", _ATTENTION | _MLP | _QK_NORMS | _NORMS_AFTER
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _MIXTURE | _SHARED,
        (*layouts.EXPERTS, *layouts.SHARED_GATES),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _MIXTURE | _QK_NORMS, layouts.EXPERTS
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _MIXTURE | _QK_NORMS, layouts.EXPERTS),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _GPT_OSS, layouts.TRANSPOSED_EXPERTS),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM", _ATTENTION | _MLP | _QK_NORMS | _NORMS_AFTER
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2, layouts.SHORT_CONVOLUTIONS, _LFM2_TOP),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _lfm2_mixture,
        (*layouts.SHORT_CONVOLUTIONS, *layouts.EXPERTS),
        _LFM2_TOP,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _qwen_mixture,
        (*layouts.QWEN3_NEXT, *layouts.EXPERTS),
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen35, layouts.QWEN3_5),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _qwen_mixture,
        (*layouts.QWEN3_5, *layouts.EXPERTS),
    ),
    "deepseek2": Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", _deepseek2, (*layouts.LATENTS, *layouts.EXPERTS)
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LLAMA, layouts.GAINS_LESS_ONE),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _ATTENTION | _MLP | _GEMMA_NORMS, layouts.GAINS_LESS_ONE
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _MLP | _QK_NORMS | _GEMMA_NORMS,
        layouts.GAINS_LESS_ONE,
    ),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", _gemma4),
}

MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", _MIXTURE, (*layouts.INTERLEAVED, *layouts.EXPERTS)
)
"""A "llama" with experts."""
