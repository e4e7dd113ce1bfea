"""Gemma 3, the text part: five sliding layers for each full one, normed queries and keys. And
Gemma 2: every second layer slides, and scores have a bound in place of those norms. And VaultGemma:
Gemma 2 without norms after attention and MLP.

The truth is transformers' `modeling_{model_type}.py`, without the `_text` of a type. Checkpoints
store gains less one; one is added when they are read. Gemma 3's `attn_logit_softcapping` has no
effect in transformers, and none here.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.decoder import Norms, decoder_model, heads_of
from cetane.families.gemma import (
    GemmaConfig,
    GemmaLayer,
    GemmaOptions,
    make_kind,
)
from cetane.families.kinds import FULL, KINDS, kind_names
from cetane.families.layers import MLP
from cetane.families.model import Model

Options = GemmaOptions
MODEL_TYPES = ("gemma2", "gemma3_text", "vaultgemma")
BEFORE = PartNames(mlp_norm="pre_feedforward_layernorm")
"""VaultGemma's names for the parts of a layer."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class Gemma3Config(GemmaConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None


def author(config: Gemma3Config, options: GemmaOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    older, bias = config.model_type != "gemma3_text", config.attention_bias
    scale, size, names = options.scale, config.hidden_size, kind_names(config)
    kinds = {}
    for layer_type in dict.fromkeys(config.layer_types):
        heads = heads_of(
            config,
            config.query_pre_attn_scalar**-0.5,
            block=options.full_block if layer_type == FULL else None,
            softcap=config.attn_logit_softcapping if older else None,
        )
        kinds[KINDS[layer_type]] = make_kind(config, config, layer_type, heads, options)
    form = AttentionForm(
        qkv_bias=bias, out_bias=bias, norms="none" if older else "head", unit_offset=True
    )
    inner, norm = config.intermediate_size, Norms(config, scale, unit_offset=True)
    around = config.model_type != "vaultgemma"
    layers: list[Block] = []
    with torch.device("meta"):
        for index, name in enumerate(names):
            factor = 1.0 if around else scale  # behind a norm, its gains have the factor
            attention = Attention(size, config.rms_norm_eps, kinds[name], form, factor)
            if around:
                layers.append(GemmaLayer(config, index, attention, inner, unit=True, scale=scale))
                continue
            mlp = MLP(size, inner, config.hidden_activation, factor=factor)
            layers.append(PreNormBlock(index, norm(), attention, norm(), mlp, BEFORE))
    return decoder_model(
        config,
        layers,
        scale,
        kinds.values(),
        embedding=size**0.5,
        unit_offset=True,
        softcap=config.final_logit_softcapping,
    )
