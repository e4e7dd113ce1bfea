"""GLM-4, of 2024 (`glm`) and of April 2025 (`glm4`), which norms what attention and MLP give too.
Both store gates and ups as one tensor. Neighbouring channels in a part of each head are rotary
pairs.

The truth is transformers' `modeling_glm.py` and `modeling_glm4.py`.
"""

from functools import partial
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import PreNormBlock, SandwichBlock, SandwichNames
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.kinds import LayerKind
from cetane.families.layers import MLP, RMSNorm
from cetane.families.model import Model
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table
from cetane.families.stored import FusedRows, InterleavedRows

Options = ResidualOptions
MODEL_TYPES = ("glm", "glm4")
AROUND = SandwichNames(
    after="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_after="post_mlp_layernorm",
)

__all__ = ["MODEL_TYPES", "Options", "author"]


class GlmConfig(DecoderConfig, Protocol):
    """The keys that are read from a GlmConfig or Glm4Config."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool


class GlmLayer(FusedRows, InterleavedRows, PreNormBlock):
    """A layer of `glm`."""

    fused = ("gate_up_proj",)


class Glm4Layer(FusedRows, InterleavedRows, SandwichBlock):
    """A layer of `glm4`."""

    fused = ("gate_up_proj",)


def author(config: GlmConfig, options: ResidualOptions) -> Model:
    """The model of a GlmConfig or Glm4Config."""
    scale, size, eps = options.scale, config.hidden_size, config.rms_norm_eps
    inner, act, heads = config.intermediate_size, config.hidden_act, heads_of(config)
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    kind = LayerKind(heads, rotary_table(config, heads.dim, part=part))
    form, norm = AttentionForm(qkv_bias=config.attention_bias), Norms(config, scale)
    around, after = config.model_type == "glm4", partial(RMSNorm, size, eps, factor=scale)
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            factor = 1.0 if around else scale  # behind a norm, its gains have the factor
            attention = Attention(size, eps, kind, form, factor)
            mlp = MLP(size, inner, act, factor=factor)
            if around:
                layers.append(Glm4Layer(index, attention, mlp, norm, after, AROUND))
            else:
                layers.append(GlmLayer(index, norm(), attention, norm(), mlp))
    return decoder_model(config, layers, scale, [kind])
