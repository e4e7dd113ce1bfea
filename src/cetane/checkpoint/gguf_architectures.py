"""The names and orders that llama.cpp's converter gives each architecture, as data.

Source: llama.cpp's convert_hf_to_gguf.py and gguf-py's tensor_mapping.
"""

from __future__ import annotations

from dataclasses import dataclass

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


_BIASED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "router",
    "experts.gate_proj", "experts.up_proj", "experts.down_proj",
)  # fmt: skip
_EXPERTS = {
    **{name: ours for name, ours in _LAYER.items() if not ours.startswith("mlp.")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str  # Hugging Face's
    model_class: str
    layer: dict[str, str]  # GGUF's name of a layer's module -> Hugging Face's
    interleaved_rope: bool = False  # rows of q and k are reordered for llama.cpp's rotary form
    norms_plus_one: bool = False  # norms are stored as 1 + weight
    turned_experts: bool = False  # transformers keeps experts transposed, gates and ups in turn

    def tensor_names(self, layers: int) -> dict[str, str]:
        """Hugging Face's name of every weight and bias of such a model, by GGUF's name."""
        modules = dict(_TOP)
        for i in range(layers):
            modules |= {
                f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}"
                for theirs, ours in self.layer.items()
            }
        weights = {
            f"{theirs}.weight": ours if ours.endswith("sinks") else f"{ours}.weight"
            for theirs, ours in modules.items()
        }
        biases = {
            f"{theirs}.bias": f"{ours}.bias"
            for theirs, ours in modules.items()
            if ours.endswith(_BIASED)
        }
        return weights | biases


ARCHITECTURES = {
    # Mistral is "llama" to llama.cpp; its modules and its config are the same.
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORMS),
    "granite": Architecture("granite", "GraniteForCausalLM", _LAYER, interleaved_rope=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _LAYER, interleaved_rope=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS | _QK_NORMS),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _EXPERTS | _QK_NORMS),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {name: ours for name, ours in _EXPERTS.items() if name != "ffn_norm"}
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
        },
        turned_experts=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        {name: ours for name, ours in _LAYER.items() if not name.endswith("_norm")}
        | _QK_NORMS
        | _NORMS_AFTER,
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _LAYER | _GEMMA_NORMS, norms_plus_one=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LAYER | _QK_NORMS | _GEMMA_NORMS,
        norms_plus_one=True,
    ),
}

MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _EXPERTS, interleaved_rope=True)
"""A "llama" with experts."""
