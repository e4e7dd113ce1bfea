"""Models as llama.cpp's converter writes them: hyperparameters and tensors."""

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "smollm3")
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


def turned_pairs(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Gemma 4's tensor of the pairs that full layers do not turn."""
    dim = config.per_layer_config["full_attention"].head_dim
    turned = int(dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (dim // 2 - turned))}


def grouped_as_tiled(
    tensor: torch.Tensor, heads: int, groups: int, before: int = 0
) -> torch.Tensor:
    """Rows of value heads: all first ones of a key head, then all second ones ..."""
    rows = tensor[before:].unflatten(0, (heads, groups, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat([tensor[:before], rows])


def of_delta_rule(
    config: transformers.PreTrainedConfig, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A tensor of a Qwen3-Next or Qwen3.5 as the file has it."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    groups, values = config.linear_num_value_heads // heads, config.linear_value_head_dim
    tiled = config.model_type != "qwen3_next"
    last = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("norm.weight"):
        return {name: tensor if "linear_attn" in name else tensor + 1}
    if last == "in_proj_qkvz":
        sizes = [keys, keys, groups * values, groups * values]
        q, k, v, z = (
            part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split(sizes, 1)
        )
        return {
            name.replace("qkvz", "qkv"): torch.cat([q, k, v]),
            name.replace("qkvz", "z"): z,
        }
    if last == "A_log":
        tensor = -tensor.exp()
    elif last == "conv1d":
        tensor = tensor.squeeze(1)
    if tiled and "linear_attn" in name:
        if last == "out_proj":
            tensor = grouped_as_tiled(tensor.T, heads, groups).T
        else:
            before = 2 * heads * keys if last in ("in_proj_qkv", "conv1d") else 0
            tensor = grouped_as_tiled(tensor, heads, groups, before)
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def as_stored(model: transformers.PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    """The tensors as the converter names, splits and turns them, before gguf's own names."""
    config, result = model.config, dict[str, torch.Tensor]()
    for name, tensor in apart(model.state_dict(), architecture == "gpt-oss").items():
        if architecture in ("qwen3next", "qwen35", "qwen35moe"):
            result |= of_delta_rule(config, name, tensor)
        elif architecture == "qwen2moe" and name.endswith("shared_expert_gate.weight"):
            result[name] = tensor.squeeze(0)
        elif architecture == "granitemoe":  # the gguf package knows other names for them
            result[name.replace("moe.router", "moe.gate").replace("block_sparse_moe", "mlp")] = (
                tensor
            )
        elif name.endswith("expert_bias"):
            result[f"{name}.bias"] = tensor
        elif name.endswith("kv_b_proj.weight"):
            both = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            result[name.replace("kv_b", "k_b")] = keys.mT
            result[name.replace("kv_b", "v_b")] = values
        elif name.endswith("conv.conv.weight"):
            result[name] = tensor.squeeze(1)
        else:
            result[f"{name}.weight" if name.endswith("layer_scalar") else name] = tensor
    return result | (turned_pairs(config) if architecture == "gemma4" else {})


def write_hybrid(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    """The keys of models whose layers differ."""
    match config.model_type:
        case "lfm2" | "lfm2_moe":
            writer.add_shortconv_l_cache(config.conv_L_cache)
            if config.model_type == "lfm2_moe":
                writer.add_expert_feed_forward_length(config.moe_intermediate_size)
                writer.add_leading_dense_block_count(config.num_dense_layers)
                writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "deepseek_v2":
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            if config.q_lora_rank is not None:
                writer.add_q_lora_rank(config.q_lora_rank)
            writer.add_kv_lora_rank(config.kv_lora_rank)
            writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
            writer.add_value_length(config.kv_lora_rank)
            writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
            writer.add_value_length_mla(config.v_head_dim)
            writer.add_expert_count(config.n_routed_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_rope_dimension_count(config.qk_rope_head_dim)
            writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
            writer.add_ssm_state_size(config.linear_key_head_dim)
            writer.add_ssm_group_count(config.linear_num_key_heads)
            writer.add_ssm_time_step_rank(config.linear_num_value_heads)
            inner = config.linear_value_head_dim * config.linear_num_value_heads
            writer.add_ssm_inner_size(inner)
            writer.add_full_attention_interval(2)
            part = config.rope_parameters["partial_rotary_factor"]
            writer.add_rope_dimension_count(int(config.head_dim * part))
            if config.model_type != "qwen3_5_text":
                writer.add_expert_feed_forward_length(config.moe_intermediate_size)
                shared = config.shared_expert_intermediate_size
                writer.add_expert_shared_feed_forward_length(shared)
        case "granitemoe":
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        case "qwen2_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        case "ministral3" | "mistral":
            rope = config.rope_parameters
            if "mscale_all_dim" in rope:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            if "llama_4_scaling_beta" in rope:
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        case "gemma4_text":
            write_gemma4(writer, config)


def write_gemma4(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full, local = (
        config.per_layer_config[f"{kind}_attention"].head_dim for kind in ("full", "sliding")
    )
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


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
    inner, kv = config.intermediate_size, config.num_key_value_heads
    if architecture == "gemma4" and config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        inner = [inner if index < own else 2 * inner for index in range(config.num_hidden_layers)]
    if architecture in ("lfm2", "lfm2moe"):
        kv = [0 if kind == "conv" else kv for kind in config.layer_types]
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if architecture == "deepseek2" else kv)
    writer.add_layer_norm_rms_eps(
        config.norm_eps if architecture in ("lfm2", "lfm2moe") else config.rms_norm_eps
    )
    write_hybrid(writer, config)
    rope = config.rope_parameters
    if architecture == "gemma4":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"] | {"rope_type": "default"}
    if architecture == "gemma3":
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "glm4":
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * config.head_dim))
    if architecture == "exaone4" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    if architecture == "hunyuan-dense" and rope.get("alpha"):
        grown = rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * grown}
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
        local = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        if local != rope["rope_theta"]:  # files of models with one base lack the key
            writer.add_rope_freq_base_swa(local)
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
        trained = config.original_max_position_embeddings
        growth = math.log(config.max_position_embeddings / trained)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth / math.log(trained)))
        rope = rope | {"rope_type": "default"}  # llama.cpp tells it by the tensors
    if architecture in ("ernie4_5", "glm4", "hunyuan-dense", "seed_oss",
                        "gemma", "gemma2", "gemma3", "qwen3", "qwen3moe", "gpt-oss", "qwen3next",
                        "qwen35", "qwen35moe", "mistral3"):  # fmt: skip
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture not in ("gemma", "gemma2"):  # there it is always llama.cpp's default
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)

    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in as_stored(model, architecture).items():
        if name == skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            q = ".q_proj." in name
            heads = config.num_attention_heads if q else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        values = np.ascontiguousarray(values)
        if name == "rope_freqs.weight":
            writer.add_tensor(name, values)
            continue
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
