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
_ONE_NORM = _weights({"attn_norm": "input_layernorm"})
_HUNYUAN_NORMS = _weights(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
_GLM = (
    _ATTENTION
    | _NORMS_BEFORE
    | _weights({"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})
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
_LAYER_NORMED = (*_BIASED, "up_proj", "down_proj", "layernorm", "model.norm")
"""The same in models with layer norms, whose other matrices may have biases too."""


def _shared(name: str) -> Names:
    """The names of the expert that all tokens share; `name` is Hugging Face's for it."""
    return _weights(
        {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}
    )


_SHARED = _shared("shared_expert") | _weights({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"})
"""Qwen's expert that all tokens share."""
_GRANITE_EXPERTS = _experts("block_sparse_moe", "router")
_GRANITE_PARTS = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj",
                  "down": "shared_mlp.output_linear"}  # fmt: skip
_ALWAYS = _weights({f"ffn_{part}_shexp": ours for part, ours in _GRANITE_PARTS.items()})
"""Granite's MLP beside experts, which all tokens take."""
_SHARED_MLP = _weights({f"ffn_{part}": ours for part, ours in _GRANITE_PARTS.items()})
"""The same where there are no experts."""


def _cohere(config: Config, index: int) -> Names:
    return _ONE_NORM | _ATTENTION | _MLP | (_QK_NORMS if config["use_qk_norm"] else {})


def _stablelm(config: Config, index: int) -> Names:
    norms = _ONE_NORM if config["use_parallel_residual"] else _NORMS_BEFORE
    return norms | _ATTENTION | _MLP


def _mamba(home: str) -> Names:
    """The names of a Mamba-2, in a part of the layer."""
    vectors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    modules = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_out": "out_proj"}
    return {theirs: f"{home}.{ours}" for theirs, ours in vectors.items()} | _weights(
        {theirs: f"{home}.{ours}" for theirs, ours in modules.items()}
    )


def _granite_hybrid(config: Config, index: int) -> Names:
    """Mamba-2 or attention. A model without experts has the MLP that others share with all."""
    mixes = config["layer_types"][index] == "mamba"
    mixer = _mamba("mamba") | _weights({"ssm_norm": "mamba.norm"}) if mixes else _ATTENTION
    if not config["num_local_experts"]:
        return _NORMS_BEFORE | mixer | _SHARED_MLP
    return _NORMS_BEFORE | mixer | _GRANITE_EXPERTS | _ALWAYS


def _falcon_h1(config: Config, index: int) -> Names:
    """Mamba-2 and attention beside each other."""
    parts = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    names = _ONE_NORM | _ATTENTION | _mamba("mamba") | _weights(parts)
    names |= {"ffn_norm": "pre_ff_layernorm.weight"}
    return names | (_weights({"ssm_norm": "mamba.norm"}) if config["mamba_rms_norm"] else {})


def _granite_mixture(config: Config, index: int) -> Names:
    names = _ATTENTION | _NORMS_BEFORE | _GRANITE_EXPERTS
    return names | (_ALWAYS if config["model_type"] == "granitemoeshared" else {})


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


_QUERIES_ON_LATENT = _weights(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
    }
)


def _deepseek2(config: Config, index: int) -> Names:
    latent = {
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
    }
    names = _NORMS_BEFORE | _weights(latent)
    if config["q_lora_rank"] is None:
        names |= _weights({"attn_q": "self_attn.q_proj"})
    else:
        names |= _QUERIES_ON_LATENT
    if index < config["first_k_dense_replace"]:
        return names | _MLP
    names |= _EXPERTS | _shared("shared_experts")
    corrected = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    return names | (corrected if config["model_type"] == "deepseek_v3" else {})


def _ernie_mixture(config: Config, index: int) -> Names:
    names, first = _ATTENTION | _NORMS_BEFORE, config["moe_layer_start_index"]
    if index < first or (index - first + 1) % config["moe_layer_interval"]:
        return names | _MLP
    if config["moe_num_shared_experts"]:
        names |= _shared("shared_experts")
    corrections = "mlp.gate.moe_statics.e_score_correction_bias"
    return names | _EXPERTS | {"exp_probs_b.bias": corrections}


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
    biased: tuple[str, ...] = _BIASED
    """The endings of the modules that may have biases."""
    layers: str = "model.layers"

    def tensor_names(self, config: Config) -> tuple[Names, Names]:
        """Hugging Face's names by GGUF's: of all weights, and of biases that there may be."""
        weights = dict(self.top)
        if config.get("hidden_size_per_layer_input"):
            weights |= _PER_LAYER
        for index in range(config["num_hidden_layers"]):
            own = self.layer if isinstance(self.layer, dict) else self.layer(config, index)
            weights |= {
                f"blk.{index}.{theirs}": f"{self.layers}.{index}.{ours}"
                for theirs, ours in own.items()
            }
        biases = {
            f"{theirs.removesuffix('.weight')}.bias": f"{module}.bias"
            for theirs, ours in weights.items()
            if (module := ours.removesuffix(".weight")).endswith(self.biased)
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

_MINICPM3 = (
    _NORMS_BEFORE
    | _QUERIES_ON_LATENT
    | _MLP
    | _weights(
        {
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_output": "self_attn.o_proj",
        }
    )
)
_NO_NORM = _weights({"token_embd": "model.embed_tokens", "output": "lm_head"})
"""OLMo's norms have no weights."""
_PHI = (
    _ONE_NORM
    | _QKV
    | _weights({"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"})
)
_PHI_TOP = _TOP | _weights({"output_norm": "model.final_layernorm"})
_PHI_BIASED = (*_LAYER_NORMED, "dense", "fc1", "fc2", "lm_head")
_MAMBA = (*_BIASED, "conv1d")
_GPT2 = _weights(
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)
_GPT2_TOP = _weights(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)
_NEOX = _NORMS_BEFORE | _weights(
    {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
_NEOX_TOP = _weights(
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "lm_head",
    }
)

ARCHITECTURES = {
    # Mistral is "llama" to llama.cpp; its modules and its config are the same.
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORMS),
    "granite": Architecture("granite", "GraniteForCausalLM", _LLAMA, layouts.INTERLEAVED),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _granite_mixture,
        (*layouts.INTERLEAVED, *layouts.EXPERTS, *layouts.SHARED_MLPS),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        (*layouts.INTERLEAVED, *layouts.EXPERTS, *layouts.SHARED_MLPS, *layouts.MAMBA_2),
        biased=_MAMBA,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _falcon_h1,
        layouts.MAMBA_2,
        _TOP | _weights({"output_norm": "model.final_layernorm"}),
        _MAMBA,
    ),
    "arcee": Architecture(
        "arcee", "ArceeForCausalLM", _ATTENTION | _NORMS_BEFORE | _UNGATED, layouts.INTERLEAVED
    ),
    # Hugging Face's rows are interleaved too, so nothing changes on the way.
    "command-r": Architecture("cohere", "CohereForCausalLM", _cohere),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", _ONE_NORM | _ATTENTION | _MLP),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _LLAMA),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", _ATTENTION | _MLP, layouts.INTERLEAVED, _NO_NORM
    ),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", _stablelm, biased=_LAYER_NORMED),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _ATTENTION | _NORMS_BEFORE | _weights({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        biased=(*_LAYER_NORMED, "c_fc", "c_proj"),
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        layouts.TRANSPOSED,
        _GPT2_TOP,
        ("ln_1", "ln_2", "ln_f", "c_attn", "c_proj", "c_fc"),
        "transformer.h",
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        layouts.HEAD_BY_HEAD,
        _NEOX_TOP,
        ("layernorm", "layer_norm", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        "gpt_neox.layers",
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", _MINICPM3),
    "phi2": Architecture("phi", "PhiForCausalLM", _PHI, (), _PHI_TOP, _PHI_BIASED),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        _ATTENTION | _NORMS_BEFORE | _UNGATED,
        layouts.GAINS_LESS_ONE,
        biased=_LAYER_NORMED,
    ),
    "jais2": Architecture(
        "jais2",
        "Jais2ForCausalLM",
        _ATTENTION | _NORMS_BEFORE | _UNGATED,
        biased=_LAYER_NORMED,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _ernie_mixture, layouts.EXPERTS
    ),
    "chatglm": Architecture("glm", "GlmForCausalLM", _GLM),
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
