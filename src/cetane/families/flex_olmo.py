"""FlexOlmo: OLMo 2 with a mixture of experts in place of each MLP. No norm stands before attention
and experts, and one behind each.

The truth is transformers' `modeling_flex_olmo.py`.
"""

from dataclasses import replace
from typing import Protocol

import torch

from cetane.families.base import Block
from cetane.families.decoder import decoder_model, heads_of
from cetane.families.experts import (
    SUM,
    ExpertOptions,
    SummedBlock,
    SumNorm,
    expert_channels,
    mixture_of,
)
from cetane.families.kinds import LayerKind
from cetane.families.layers import RMSNorm
from cetane.families.model import Model
from cetane.families.olmo2 import OlmoConfig, OlmoLayer
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("flex_olmo",)

__all__ = ["MODEL_TYPES", "Options", "author"]


class FlexOlmoConfig(OlmoConfig, Protocol):
    """The keys that are read from a FlexOlmoConfig, beside OLMo 2's."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


def author(config: FlexOlmoConfig, options: ExpertOptions) -> Model:
    """The model of a FlexOlmoConfig."""
    heads, scale = heads_of(config), options.scale
    kind = LayerKind(heads, rotary_table(config, heads.dim))
    mixture = mixture_of(
        config,
        options,
        config.num_experts,
        config.intermediate_size,
        config.norm_topk_prob,
        inverse=scale,
    )
    mixture = replace(mixture, factor=1.0)  # the gains of the norm behind have the stream's
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps, factor=scale)
            layers.append(OlmoLayer(config, index, kind, scale, dense=False))
            layers.append(SummedBlock(mixture, index, None))
            layers.append(SumNorm(index, "post_feedforward_layernorm", norm))
    channels = expert_channels(mixture) | {SUM: mixture.hidden}
    return decoder_model(config, layers, scale, [kind], channels=channels)
