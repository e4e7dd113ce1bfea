"""Jamba: layers with a scan of Mamba beside a few that attend without positions. Behind them an
MLP, or experts whose weights do not sum to 1.

The truth is transformers' `modeling_jamba.py`.
"""

from dataclasses import replace
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.experts import (
    ExpertConfig,
    ExpertOptions,
    MixtureBlock,
    expert_channels,
    mixture_of,
)
from cetane.families.kinds import FULL, LINEAR, LayerKind
from cetane.families.layers import MLP
from cetane.families.model import Model
from cetane.families.rotary import RotaryTable
from cetane.families.selective_scan import ScanForm, ScanRows, SelectiveScan

Options = ExpertOptions
MODEL_TYPES = ("jamba",)
ATTENDS = PartNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward")
MIXES = replace(ATTENDS, mixer="mamba")
"""The names of the parts of layers."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class JambaConfig(DecoderConfig, ExpertConfig, Protocol):
    """The keys that are read from a JambaConfig."""

    hidden_size: int
    hidden_act: str
    layer_types: list[str]
    layers_num_experts: list[int]
    """Both follow from periods and offsets."""
    num_experts: int
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_dt_rank: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool


class JambaBlock(ScanRows, PreNormBlock):
    """A layer, perhaps without what is behind its mixer."""


def author(config: JambaConfig, options: ExpertOptions) -> Model:
    """The model of a JambaConfig."""
    scale, size, inner = options.scale, config.hidden_size, config.intermediate_size
    norm, scan, types = Norms(config, scale), scan_form(config), config.layer_types
    kind = LayerKind(heads_of(config), RotaryTable(torch.empty(0)), positioned=False)
    sparse = [count > 1 for count in config.layers_num_experts]
    experts = mixture_of(config, options, config.num_experts, inner, False) if any(sparse) else None
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(types):
            attends = layer_type == FULL
            names = ATTENDS if attends else MIXES
            mixer: Mixer = (
                Attention(size, config.rms_norm_eps, kind, AttentionForm(), scale)
                if attends
                else SelectiveScan(scan, scale)
            )
            if experts is None or not sparse[index]:
                mlp = MLP(size, inner, config.hidden_act, factor=scale)
                layers.append(JambaBlock(index, norm(), mixer, norm(), mlp, names))
                continue
            layers.append(JambaBlock(index, norm(), mixer, names=names, alone="mix"))
            layers.append(MixtureBlock(experts, index, norm(), "router", names=names))
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if FULL in types else [],
        norm="model.final_layernorm.weight",
        memory=scan.memory if LINEAR in types else {},
        channels=expert_channels(experts),
    )


def scan_form(config: JambaConfig) -> ScanForm:
    """The layers of Mamba."""
    return ScanForm(
        size=config.hidden_size,
        channels=config.mamba_expand * config.hidden_size,
        states=config.mamba_d_state,
        rank=config.mamba_dt_rank,
        taps=config.mamba_d_conv,
        act=config.hidden_act,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        norm_eps=config.rms_norm_eps,
        norm_gains=True,
    )
