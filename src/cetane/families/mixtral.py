"""Mixtral, Qwen3-MoE (q/k norms, some layers without experts) and OLMoE (norms of all heads
together): Llama's attention, and many experts of which a token takes a few.

The truth is transformers' `modeling_{model_type}.py`.
"""

from typing import Protocol

from cetane.families.base import Block, Model
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    expert_channels,
    is_dense,
)
from cetane.families.llama import (
    LlamaAttentionBlock,
    LlamaConfig,
    LlamaLayer,
    Place,
    Traits,
    decoder,
)
from cetane.families.options import residual_eps

Options = ExpertOptions
MODEL_TYPES = ("mixtral", "olmoe", "qwen3_moe")

__all__ = ["MODEL_TYPES", "Options", "author"]


class MixtralConfig(LlamaConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    """Mixtral has none: its weights are always normalised."""
    moe_intermediate_size: int
    """Only Qwen3-MoE has it; `intermediate_size` is then of layers without experts."""
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    """Only Qwen3-MoE has the last two: layers without experts."""
    clip_qkv: float | None
    """Only OLMoE has it."""


def traits(config: MixtralConfig) -> Traits:
    """What differs in attention."""
    match config.model_type:
        case "qwen3_moe":
            own = config.attention_bias
            return Traits(qkv_bias=own, out_bias=own, norms="head")
        case "olmoe":
            own = config.attention_bias
            return Traits(qkv_bias=own, out_bias=own, norms="whole", clip=config.clip_qkv)
    return Traits()


def author(config: MixtralConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own, scale = traits(config), options.scale
    mixture = Mixture(
        hidden=config.hidden_size,
        inner=getattr(config, "moe_intermediate_size", config.intermediate_size),
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        normalised=getattr(config, "norm_topk_prob", True),
        act=config.hidden_act,
        together=options.together,
        factor=scale,
    )
    window = None if config.model_type == "olmoe" else config.sliding_window
    eps = residual_eps(config.rms_norm_eps, scale)

    def layer(place: Place) -> tuple[Block, ...]:
        if config.model_type == "qwen3_moe" and is_dense(config, place.index):
            return (LlamaLayer(config, own, place),)
        attention = LlamaAttentionBlock(config, own, place)
        return attention, MixtureBlock(mixture, place.index, eps)

    windows = [window] * config.num_hidden_layers
    return decoder(config, own, scale, windows, layer, expert_channels(mixture))
