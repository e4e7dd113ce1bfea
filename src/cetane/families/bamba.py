"""Bamba: layers of Mamba-2 beside a few that attend, with positions in half of each head. All have
an MLP behind them.

The truth is transformers' `modeling_bamba.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.kinds import FULL, LINEAR, LayerKind
from cetane.families.layers import MLP
from cetane.families.mamba2 import Mamba2, Mamba2Config, MambaRows, mamba2_form
from cetane.families.model import Model
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table

Options = ResidualOptions
MODEL_TYPES = ("bamba",)
ATTENDS = PartNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward")
MIXES = PartNames(mixer="mamba", mlp_norm="pre_ff_layernorm", mlp="feed_forward")
"""The names of the parts of layers."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class BambaConfig(DecoderConfig, Mamba2Config, Protocol):
    """The keys that are read from a BambaConfig."""

    model_type: str
    hidden_size: int
    rms_norm_eps: float
    layer_types: list[str]
    """It follows from `attn_layer_indices`."""
    attention_bias: bool
    mlp_bias: bool


class BambaBlock(MambaRows, PreNormBlock):
    """A layer."""


def author(config: BambaConfig, options: ResidualOptions) -> Model:
    """The model of a BambaConfig."""
    scale, size, bias = options.scale, config.hidden_size, config.attention_bias
    heads, norm = heads_of(config), Norms(config, scale)
    mamba = mamba2_form(config, config.mamba_proj_bias)
    form = AttentionForm(qkv_bias=bias, out_bias=bias)
    part = config.rope_parameters["partial_rotary_factor"]
    kind = LayerKind(heads, rotary_table(config, heads.dim, part=part))
    types = config.layer_types
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(types):
            attends = layer_type == FULL
            mixer: Mixer = (
                Attention(size, config.rms_norm_eps, kind, form, scale)
                if attends
                else Mamba2(mamba, scale)
            )
            mlp = MLP(size, config.intermediate_size, config.hidden_act, config.mlp_bias, scale)
            names = ATTENDS if attends else MIXES
            layers.append(BambaBlock(index, norm(), mixer, norm(), mlp, names))
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if FULL in types else [],
        norm="model.final_layernorm.weight",
        memory=mamba.memory if LINEAR in types else {},
    )
