"""Tiny models in every form that `open_checkpoint` reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # general.architecture, then what the config has beyond TINY
    "llama": ("llama", {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}),
    "llama-tied": ("llama", {"model_type": "llama", "tie_word_embeddings": True}),
    "llama-bias": ("llama", {"model_type": "llama", "attention_bias": True}),
    "qwen2": ("qwen2", {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-yarn": (
        "qwen2",
        {
            "model_type": "qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 16}),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], transformers.PreTrainedModel]:
    """A random model of the named variant, with norms and biases that are not their defaults."""

    def build(variant: str) -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**(TINY | VARIANTS[variant][1]))
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * 0.1
        return model

    return build


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write a model as llama.cpp's converter does. Names come from the gguf package itself."""

    def write(
        path: Path,
        variant: str,
        model: transformers.PreTrainedModel,
        quantization: gguf.GGMLQuantizationType | None = None,
        extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
        skip: str | None = None,
    ) -> Path:
        architecture = VARIANTS[variant][0]
        config = model.config
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        if architecture == "gemma3":
            rope = rope["full_attention"]
            writer.add_sliding_window(config.sliding_window)
        if architecture in ("gemma3", "qwen3"):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] != "default":
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)

        kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            if name == skip or (name == "lm_head.weight" and config.tie_word_embeddings):
                continue
            values = tensor.numpy()
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                q = ".q_proj." in name
                heads = config.num_attention_heads if q else config.num_key_value_heads
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            if architecture == "gemma3" and name.endswith("norm.weight"):
                values = values + 1
            values = np.ascontiguousarray(values)
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if quantization is not None and values.ndim == 2:
                packed = gguf.quants.quantize(values, quantization)
                writer.add_tensor(target, packed, raw_dtype=quantization)
            else:
                writer.add_tensor(target, values)
        extra(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
