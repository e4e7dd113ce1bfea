"""Granite 4.0: layers of Mamba-2 beside a few that attend without positions, with Granite's
multipliers. Behind them an MLP, or experts beside it. Granite 4.0 without H attends in all layers,
with positions.

The truth is transformers' `modeling_granitemoehybrid.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention
from cetane.families.base import Block
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.decoder import Norms, decoder_model, heads_of
from cetane.families.experts import ExpertOptions, SharedExpert, expert_channels, mixture_of
from cetane.families.kinds import FULL, LINEAR, LayerKind, check_types
from cetane.families.layers import MLP
from cetane.families.llama import LlamaConfig, multiplied
from cetane.families.mamba2 import Mamba2, Mamba2Config, MambaRows, mamba2_form
from cetane.families.mixtral import granite_block
from cetane.families.model import Model
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("granitemoehybrid",)
ATTENDS, MIXES = PartNames(mlp="shared_mlp"), PartNames(mixer="mamba", mlp="shared_mlp")
"""The names of the parts of layers."""
MLP_NAMES = "gate_proj", "up_proj", "output_linear"

__all__ = ["MODEL_TYPES", "Options", "author"]


class GraniteHybridConfig(LlamaConfig, Mamba2Config, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    position_embedding_type: str | None
    shared_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    """Of the last, `intermediate_size` is the width; without experts, both are zero."""


class HybridBlock(MambaRows, PreNormBlock):
    """A layer that stores gates and ups as one tensor too."""

    fused = ("in_proj", "input_linear")


def author(config: GraniteHybridConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check_types(config, (LINEAR, FULL))
    own, scale = multiplied(config, 1 / config.logits_scaling), options.scale
    size, inner, act = config.hidden_size, config.shared_intermediate_size, config.hidden_act
    norm, added, types = Norms(config, scale), scale * own.residual, config.layer_types
    heads, mamba = heads_of(config, own.scores), mamba2_form(config, config.mamba_proj_bias)
    positioned = config.position_embedding_type == "rope"
    kind = LayerKind(heads, rotary_table(config, heads.dim), positioned=positioned)
    count, narrow = config.num_local_experts, config.intermediate_size
    experts = mixture_of(config, options, count, narrow, True, own.residual) if count else None
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(types):
            attends = layer_type == FULL
            names = ATTENDS if attends else MIXES
            mixer: Mixer = (
                Attention(size, config.rms_norm_eps, kind, own.form, added)
                if attends
                else Mamba2(mamba, added)
            )
            if experts is None:
                mlp = MLP(size, inner, act, factor=added, names=MLP_NAMES)
                layers.append(HybridBlock(index, norm(), mixer, norm(), mlp, names))
                continue
            layers.append(HybridBlock(index, norm(), mixer, names=names, alone="mix"))
            shared = SharedExpert(size, inner, act, added)
            layers.append(granite_block(experts, index, norm(), shared))
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if FULL in types else [],
        embedding=own.embedding,
        logits=own.logits,
        memory=mamba.memory if LINEAR in types else {},
        channels=expert_channels(experts),
    )
