"""AFMoE (Arcee's Trinity): sigmoids gate what attention gives, and each part of a layer is normed
before and after. Full layers give queries and keys no positions.

The first layers have one MLP for all tokens. The others have experts, chosen by corrected sigmoids,
beside those that all tokens share. The truth is transformers' `modeling_afmoe.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import SandwichBlock, SandwichNames
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.experts import (
    SUM,
    ExpertOptions,
    SharedExpert,
    SummedBlock,
    SumNorm,
    expert_channels,
    mixture_of,
)
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import MLP, RMSNorm
from cetane.families.model import Model
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("afmoe",)
NAMES = SandwichNames(mlp_norm="pre_mlp_layernorm", mlp_after="post_mlp_layernorm")

__all__ = ["MODEL_TYPES", "Options", "author"]


class AfmoeConfig(DecoderConfig, Protocol):
    """The keys that are read from an AfmoeConfig."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    layer_types: list[str]
    sliding_window: int | None
    mup_enabled: bool | None
    """Whether embeddings have a factor."""
    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    route_scale: float
    """The factor on the outputs of chosen experts."""


def author(config: AfmoeConfig, options: ExpertOptions) -> Model:
    """The model of an AfmoeConfig."""
    scale, size, eps = options.scale, config.hidden_size, config.rms_norm_eps
    act, bias, narrow = config.hidden_act, config.attention_bias, config.moe_intermediate_size
    heads, names = heads_of(config), kind_names(config)
    rotary = rotary_table(config, heads.dim)
    kinds = {
        name: LayerKind(
            heads,
            rotary,
            config.sliding_window if name == "sliding" else None,
            name=name,
            positioned=name == "sliding",
        )
        for name in dict.fromkeys(names)
    }
    mixture = mixture_of(config, options, config.num_experts, narrow, normalised=True, sigmoid=True)
    # The gains of the norm behind have the stream's factor.
    mixture = replace(mixture, factor=config.route_scale)
    form = AttentionForm(bias, bias, norms="head", gates="channel")
    before, after = Norms(config, scale), partial(RMSNorm, size, eps, factor=scale)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, name in enumerate(names):
            attention = Attention(size, eps, kinds[name], form)
            dense = index < config.num_dense_layers
            mlp = MLP(size, config.intermediate_size, act) if dense else None
            layers.append(SandwichBlock(index, attention, mlp, before, after, NAMES))
            if dense:
                continue
            shared = SharedExpert(size, narrow * config.num_shared_experts, act, 1.0)
            layers.append(
                SummedBlock(
                    mixture,
                    index,
                    before(),
                    "router.gate",
                    shared=shared,
                    shared_name="mlp.shared_experts",
                    names=NAMES,
                    correction="expert_bias",
                )
            )
            layers.append(SumNorm(index, NAMES.mlp_after, after()))
    return decoder_model(
        config,
        layers,
        scale,
        kinds.values(),
        embedding=size**0.5 if config.mup_enabled else 1.0,
        channels=expert_channels(mixture) | {SUM: size},
    )
