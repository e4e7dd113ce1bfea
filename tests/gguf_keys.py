"""Hyperparameters as llama.cpp's converter writes them."""

import math
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
import transformers

Writer = gguf.GGUFWriter
Config = transformers.PreTrainedConfig

LFM2 = ("lfm2", "lfm2moe")
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
MAMBA = ("falcon-h1", "granitehybrid")
HEAD_WIDTH = (
    "afmoe", "cohere2", "command-r", "dots1", "ernie4_5", "ernie4_5-moe", "exaone-moe",
    "falcon-h1", "gemma", "gemma2", "gemma3", "gemma3n", "glm4", "glm4moe", "gpt-oss",
    "hunyuan-dense", "hunyuan-moe", "llama4", "mellum", "minimax-m2", "mistral3", "nemotron_h",
    "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "seed_oss",
)  # fmt: skip
"""The architectures whose files say how wide a head is."""
EPSILONS = {
    "cohere2": "layer_norm_eps", "command-r": "layer_norm_eps", "falcon": "layer_norm_epsilon",
    "gpt2": "layer_norm_epsilon", "nemotron_h": "layer_norm_epsilon",
    "nemotron_h_moe": "layer_norm_epsilon",
    "gptneox": "layer_norm_eps", "jais2": "layer_norm_eps", "nemotron": "norm_eps",
    "phi2": "layer_norm_eps", "stablelm": "layer_norm_eps", "starcoder": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
}  # fmt: skip
"""What configs of models with layer norms call the epsilon."""
UNSAID_BASE = (
    "falcon", "gemma", "gemma2", "gpt2", "gptneox", "minicpm3", "nemotron_h", "nemotron_h_moe",
    "phi2", "stablelm", "starcoder",
)  # fmt: skip
"""The architectures whose files have no rotary base: it is always llama.cpp's default."""
PARTS = ("chatglm", "glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "stablelm")
"""The architectures whose heads turn in part."""


def write_keys(writer: Writer, architecture: str, config: Config) -> None:
    """The hyperparameters of a model."""
    if architecture == "mamba2":
        write_mamba2(writer, config)
        return
    write_sizes(writer, architecture, config)
    if architecture in OWN:
        OWN[architecture](writer, config)
    write_rotary(writer, architecture, config)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)


def write_sizes(writer: Writer, architecture: str, config: Config) -> None:
    """What all models have."""
    inner, heads = config.intermediate_size, config.num_attention_heads
    kv = 1 if architecture == "starcoder" else getattr(config, "num_key_value_heads", heads)
    if architecture == "gemma4" and config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        inner = [inner if index < own else 2 * inner for index in range(config.num_hidden_layers)]
    if architecture == "granitehybrid":
        kv = [kv if kind == "full_attention" else 0 for kind in config.layer_types]
    if architecture in NEMOTRON:
        kv = [kv if kind == "full_attention" else 0 for kind in config.layers_block_type]
        wide = {"mlp": inner, "moe": config.moe_intermediate_size}
        inner = [wide.get(kind, 0) for kind in config.layers_block_type]
    if architecture == "llama4":
        inner = config.intermediate_size_mlp
    if architecture == "falcon":  # the converter's, whatever the model has
        inner = 4 * config.hidden_size
        kv = config.num_kv_heads if config.new_decoder_architecture else 1
    if architecture in LFM2:
        kv = [0 if kind == "conv" else kv for kind in config.layer_types]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if architecture == "deepseek2" else kv)
    if architecture in EPSILONS:
        writer.add_layer_norm_eps(getattr(config, EPSILONS[architecture]))
    elif architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)  # no config has it
    else:
        eps = config.norm_eps if architecture in LFM2 else config.rms_norm_eps
        writer.add_layer_norm_rms_eps(eps)
    if architecture in HEAD_WIDTH:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if experts := getattr(config, "num_experts", None):  # some configs know it by this name too
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def write_rotary(writer: Writer, architecture: str, config: Config) -> None:
    """The rotary parameters. A file has one set: that of full layers, and a base for the others."""
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    if architecture in PARTS:
        width = config.hidden_size // config.num_attention_heads
        part = rope["partial_rotary_factor"] * getattr(config, "head_dim", width)
        writer.add_rope_dimension_count(int(part))
    if "sliding_attention" in rope:
        local, rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
        # Files of an OLMo 3 with one base lack the key, and those of Gemma 3 always do.
        if architecture in ("gemma3n", "gemma4", "mellum") or (
            architecture == "olmo2" and local != rope["rope_theta"]
        ):
            writer.add_rope_freq_base_swa(local)
    if architecture == "gemma4":
        rope = rope | {"rope_type": "default"}  # a tensor says which pairs turn
    if architecture == "hunyuan-dense" and rope.get("alpha"):
        grown = rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * grown}
    if architecture == "granitehybrid" and config.model_type == "bamba":
        part = rope["partial_rotary_factor"] * config.hidden_size / config.num_attention_heads
        writer.add_rope_dimension_count(int(part))
    if rope["rope_type"] == "longrope":
        write_longrope(writer, config, rope)
        rope = rope | {"rope_type": "default"}  # llama.cpp tells it by the tensors
    if architecture not in UNSAID_BASE:
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


def write_longrope(writer: Writer, config: Config, rope: dict[str, Any]) -> None:
    for name in ("long", "short"):
        factors = np.array(rope[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)
    trained = config.original_max_position_embeddings
    growth = math.log(config.max_position_embeddings / trained)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth / math.log(trained)))


# What single architectures have.


def write_windows(writer: Writer, config: Config) -> None:
    """A window, and which layers see no more than it."""
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])


def write_deepseek2(writer: Writer, config: Config) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.model_type == "deepseek_v3":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def write_sigmoids(writer: Writer, config: Config) -> None:
    """Experts that are weighed by a sigmoid of each, and one that all tokens share."""
    shared = "num_shared_experts" if hasattr(config, "num_shared_experts") else "n_shared_experts"
    if hasattr(config, "n_routed_experts"):
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(getattr(config, shared))
    if hasattr(config, "first_k_dense_replace"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)


def write_exaone_moe(writer: Writer, config: Config) -> None:
    write_sigmoids(writer, config)
    write_windows(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_afmoe(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_weights_scale(config.route_scale)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_leading_dense_block_count(config.num_dense_layers)


def write_minimax(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_hunyuan_moe(writer: Writer, config: Config) -> None:
    writer.add_expert_used_count(config.moe_topk[0])
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)


def write_phimoe(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    trained = config.rope_parameters.get("original_max_position_embeddings")
    writer.add_rope_scaling_orig_ctx_len(trained or config.max_position_embeddings)


def write_mellum(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_windows(writer, config)


def write_llama4(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def write_granite_windows(writer: Writer, config: Config) -> None:
    write_granite(writer, config)
    write_windows(writer, config)
    turns = [base > 0 for base in config.layer_rope_theta]
    writer.add_array("granite_swa.attention.rope_pattern", turns)
    if config.model_type == "granitemoe_swa":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def write_gemma3n(writer: Writer, config: Config) -> None:
    write_windows(writer, config)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern)
    normal = torch.distributions.normal.Normal(0, 1)
    writer.add_activation_sparsity_scale(normal.icdf(shares).tolist())


def write_exaone4(writer: Writer, config: Config) -> None:
    if config.sliding_window is not None:
        write_windows(writer, config)


def write_gemma2(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_gemma3(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config.sliding_window)


def write_gemma4(writer: Writer, config: Config) -> None:
    full, local = (
        config.per_layer_config[f"{kind}_attention"].head_dim for kind in ("full", "sliding")
    )
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    write_windows(writer, config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_cohere(writer: Writer, config: Config) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.model_type == "cohere2":
        writer.add_sliding_window(config.sliding_window)


def write_ernie_moe(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)


def write_mamba(writer: Writer, config: Config) -> None:
    inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def write_mamba2(writer: Writer, config: Config) -> None:
    """What Mamba-2 alone has: no attention, and no end of its context."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.num_heads)


def write_nemotron_h(writer: Writer, config: Config) -> None:
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if "moe" in config.layers_block_type:
        write_sigmoids(writer, config)
        shared = config.moe_shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(shared)


def write_granitehybrid(writer: Writer, config: Config) -> None:
    write_mamba(writer, config)
    writer.add_rope_scaling_finetuned(config.model_type == "bamba")
    if config.model_type == "bamba":
        return
    write_granite(writer, config)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def write_minicpm3(writer: Writer, config: Config) -> None:
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def write_olmo(writer: Writer, config: Config) -> None:
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def write_parallel(writer: Writer, config: Config) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


def write_gpt_oss(writer: Writer, config: Config) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def write_granite(writer: Writer, config: Config) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def write_granitemoe(writer: Writer, config: Config) -> None:
    write_granite(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def write_lfm2(writer: Writer, config: Config) -> None:
    writer.add_shortconv_l_cache(config.conv_L_cache)


def write_lfm2moe(writer: Writer, config: Config) -> None:
    write_lfm2(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_mistral3(writer: Writer, config: Config) -> None:
    rope = config.rope_parameters
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write_olmo2(writer: Writer, config: Config) -> None:
    if config.model_type == "olmo3":
        write_windows(writer, config)


def write_phi3(writer: Writer, config: Config) -> None:
    width = config.hidden_size // config.num_attention_heads
    part = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(part * width))
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


def write_qwen2moe(writer: Writer, config: Config) -> None:
    write_qwen3moe(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def write_qwen3moe(writer: Writer, config: Config) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def write_delta_rule(writer: Writer, config: Config) -> None:
    """Every second layer attends."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    part = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * part))


def write_qwen3next(writer: Writer, config: Config) -> None:
    write_delta_rule(writer, config)
    write_qwen2moe(writer, config)


OWN: dict[str, Callable[[Writer, Config], None]] = {
    "afmoe": write_afmoe, "dots1": write_sigmoids, "exaone-moe": write_exaone_moe,
    "gemma3n": write_gemma3n, "glm4moe": write_sigmoids, "granite_swa": write_granite_windows,
    "hunyuan-moe": write_hunyuan_moe, "llama4": write_llama4, "mellum": write_mellum,
    "minimax-m2": write_minimax, "nemotron_h": write_nemotron_h,
    "nemotron_h_moe": write_nemotron_h, "phimoe": write_phimoe,
    "cohere2": write_cohere, "command-r": write_cohere, "deepseek2": write_deepseek2,
    "ernie4_5-moe": write_ernie_moe, "exaone4": write_exaone4, "falcon-h1": write_mamba,
    "gemma2": write_gemma2, "gemma3": write_gemma3, "gemma4": write_gemma4,
    "gpt-oss": write_gpt_oss, "gptneox": write_parallel, "granite": write_granite,
    "granitehybrid": write_granitehybrid, "granitemoe": write_granitemoe, "lfm2": write_lfm2,
    "lfm2moe": write_lfm2moe, "minicpm3": write_minicpm3, "mistral3": write_mistral3,
    "olmo": write_olmo, "olmo2": write_olmo2, "phi3": write_phi3, "qwen2moe": write_qwen2moe,
    "qwen35": write_delta_rule, "qwen35moe": write_qwen3next, "qwen3moe": write_qwen3moe,
    "qwen3next": write_qwen3next, "stablelm": write_parallel,
}  # fmt: skip
"""The keys of an architecture's own, by its name in files."""
