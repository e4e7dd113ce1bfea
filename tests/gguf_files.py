"""Models as llama.cpp's converter writes them: hyperparameters and tensors."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

INTERLEAVED = ("llama", "granite", "smollm3")
"""Architectures whose rows of q and k llama.cpp's converter puts in another order."""


def apart(tensors: dict[str, torch.Tensor], turned: bool) -> dict[str, torch.Tensor]:
    """The tensors, with the gates of experts apart from what stands beside them.

    `turned`: as gpt-oss keeps them, transposed, gates and ups in turn.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.partition("experts.")
        end = ".bias" if last.endswith("_bias") else ".weight"
        if turned and last and end == ".weight":
            tensor = tensor.mT
        if last.startswith("gate_up_proj"):
            halves = (tensor[:, ::2], tensor[:, 1::2]) if turned else tensor.chunk(2, dim=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                result[f"{prefix}experts.{part}_proj{end}"] = half
        elif last.startswith("down_proj"):
            result[f"{prefix}experts.down_proj{end}"] = tensor
        else:
            result[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return result


def write_gguf(
    path: Path,
    architecture: str,
    model: transformers.PreTrainedModel,
    quantization: gguf.GGMLQuantizationType | None = None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: str | None = None,
) -> Path:
    """Names come from the gguf package; `quantization` is of matrices, `extra` adds keys."""
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
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        turned = int(
            rope["partial_rotary_factor"] * config.hidden_size // config.num_attention_heads
        )
        writer.add_rope_dimension_count(turned)
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "olmo2" and config.model_type == "olmo3":
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
        rope = rope | {"rope_type": "default"}  # llama.cpp tells it by the tensors
    if architecture in ("gemma2", "gemma3", "qwen3", "qwen3moe", "gpt-oss"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)

    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in apart(model.state_dict(), architecture == "gpt-oss").items():
        if name == skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            q = ".q_proj." in name
            heads = config.num_attention_heads if q else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
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
