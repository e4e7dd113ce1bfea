"""Mixtral and its relatives: Llama's attention, and many experts of which a token takes a few.

- Granite-MoE has Granite's multipliers;
- OLMoE norms all heads of queries and keys together;
- Qwen2-MoE has biases on queries, keys and values, and an expert that all tokens share;
- Qwen3-MoE norms queries and keys. Some layers of both Qwens have no experts.

The truth is transformers' `modeling_{model_type}.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import NAMES, PartNames, PreNormBlock
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
from cetane.families.llama import LlamaConfig, Traits, layer_kinds, multiplied
from cetane.families.model import Model

Options = ExpertOptions
MODEL_TYPES = ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
QWENS = ("qwen2_moe", "qwen3_moe")

__all__ = ["MODEL_TYPES", "Options", "author"]


class MixtralConfig(LlamaConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_experts: int
    num_local_experts: int
    """Granite-MoE has it in place of `num_experts`."""
    num_experts_per_tok: int
    norm_topk_prob: bool
    """Mixtral and Granite-MoE have none: their weights are always normalised."""
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


def traits(config: MixtralConfig) -> Traits:
    """What differs between the relatives, but for experts."""
    match config.model_type:
        case "granitemoe":
            return multiplied(config, 1 / config.logits_scaling)
        case "mixtral":
            return Traits(AttentionForm())
        case "qwen2_moe":
            return Traits(AttentionForm(qkv_bias=config.qkv_bias))
    own = config.attention_bias
    if config.model_type == "qwen3_moe":
        return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="head"))
    clip = config.clip_qkv
    return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="whole", clip=clip))


def author(config: MixtralConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own, scale, size = traits(config), options.scale, config.hidden_size
    kinds, norm, added = layer_kinds(config, own.scores), Norms(config, scale), scale * own.residual
    partly, granite = config.model_type in QWENS, config.model_type == "granitemoe"
    inner = config.moe_intermediate_size if partly else config.intermediate_size
    count = config.num_local_experts if granite else config.num_experts
    normalised = granite or config.model_type == "mixtral" or config.norm_topk_prob
    dense = [partly and is_dense(config, index) for index in range(len(kinds))]
    experts = (
        None if all(dense) else mixture_of(config, options, count, inner, normalised, own.residual)
    )
    names, router = (PartNames(mlp="block_sparse_moe"), "router") if granite else (NAMES, "gate")
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            attention = Attention(size, config.rms_norm_eps, kind, own.form, added)
            if experts is None or dense[index]:
                mlp = MLP(size, config.intermediate_size, config.hidden_act, factor=scale)
                layers.append(PreNormBlock(index, norm(), attention, norm(), mlp))
                continue
            together = shared(config, scale)
            layers.append(PreNormBlock(index, norm(), attention))
            layers.append(
                MixtureBlock(experts, index, norm(), router, shared=together, names=names)
            )
    return decoder_model(
        config,
        layers,
        scale,
        kinds,
        embedding=own.embedding,
        logits=own.logits,
        channels=expert_channels(experts),
    )


def shared(config: MixtralConfig, factor: float) -> SharedExpert | None:
    """The expert of a layer that all tokens share; None if there is none."""
    if config.model_type != "qwen2_moe" or not config.shared_expert_intermediate_size:
        return None
    inner, act = config.shared_expert_intermediate_size, config.hidden_act
    return SharedExpert(config.hidden_size, inner, act, factor, gated=True)
