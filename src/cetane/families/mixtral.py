"""Mixtral and its relatives: Llama's attention, and many experts of which a token takes a few.

- OLMoE norms all heads of queries and keys together;
- Qwen2-MoE has biases on queries, keys and values, and an expert that all tokens share;
- Qwen3-MoE norms queries and keys. Some layers of both Qwens have no experts.

The truth is transformers' `modeling_{model_type}.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import PreNormBlock
from cetane.families.decoder import Norms, decoder_model
from cetane.families.experts import (
    ExpertOptions,
    MixtureBlock,
    SharedExpert,
    expert_channels,
    is_dense,
    mixture_of,
)
from cetane.families.layers import MLP
from cetane.families.llama import LlamaConfig, layer_kinds
from cetane.families.model import Model

Options = ExpertOptions
MODEL_TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
QWENS = ("qwen2_moe", "qwen3_moe")

__all__ = ["MODEL_TYPES", "Options", "author"]


class MixtralConfig(LlamaConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    """Mixtral has none: its weights are always normalised."""
    moe_intermediate_size: int
    """Only the Qwens have it; `intermediate_size` is then of layers without experts."""
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    """Only the Qwens have the last two: layers without experts."""
    qkv_bias: bool
    shared_expert_intermediate_size: int
    """Only Qwen2-MoE has the last two."""
    clip_qkv: float | None
    """Only OLMoE has it."""


def form(config: MixtralConfig) -> AttentionForm:
    """What differs in attention."""
    if config.model_type == "mixtral":
        return AttentionForm()
    if config.model_type == "qwen2_moe":
        return AttentionForm(qkv_bias=config.qkv_bias)
    own = config.attention_bias
    if config.model_type == "qwen3_moe":
        return AttentionForm(qkv_bias=own, out_bias=own, norms="head")
    return AttentionForm(qkv_bias=own, out_bias=own, norms="whole", clip=config.clip_qkv)


def author(config: MixtralConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own, scale, size = form(config), options.scale, config.hidden_size
    kinds, norm = layer_kinds(config), Norms(config, scale)
    partly = config.model_type in QWENS
    inner = config.moe_intermediate_size if partly else config.intermediate_size
    normalised = config.model_type == "mixtral" or config.norm_topk_prob
    dense = [partly and is_dense(config, index) for index in range(len(kinds))]
    mixture = (
        None if all(dense) else mixture_of(config, options, config.num_experts, inner, normalised)
    )
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            attention = Attention(size, config.rms_norm_eps, kind, own, scale)
            if mixture is None or dense[index]:
                mlp = MLP(size, config.intermediate_size, config.hidden_act, factor=scale)
                layers.append(PreNormBlock(index, norm(), attention, norm(), mlp))
            else:
                layers.append(PreNormBlock(index, norm(), attention))
                layers.append(MixtureBlock(mixture, index, norm(), shared=shared(config, scale)))
    return decoder_model(config, layers, scale, kinds, channels=expert_channels(mixture))


def shared(config: MixtralConfig, factor: float) -> SharedExpert | None:
    """The expert of a layer that all tokens share; None if there is none."""
    if config.model_type != "qwen2_moe" or not config.shared_expert_intermediate_size:
        return None
    inner, act = config.shared_expert_intermediate_size, config.hidden_act
    return SharedExpert(config.hidden_size, inner, act, factor, gated=True)
