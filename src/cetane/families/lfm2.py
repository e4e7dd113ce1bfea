"""LFM2: short convolutions with gates, and attention with normed queries and keys in some layers.

A convolution keeps the last columns of its gated input: a history. The truth is transformers'
`modeling_lfm2.py`.
"""

from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Flow, Memory
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, decoder_model, heads_of
from cetane.families.kinds import LayerKind
from cetane.families.layers import MLP, CausalTaps, Projection, RMSNorm
from cetane.families.model import History, Model
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table

Options = ResidualOptions
MODEL_TYPES = ("lfm2",)

FORM = AttentionForm(norms="head", output="out_proj", normed=("q_layernorm", "k_layernorm"))
MLP_NAMES = "w1", "w3", "w2"

__all__ = ["MODEL_TYPES", "Options", "author"]


class Lfm2Config(DecoderConfig, Protocol):
    """The keys that are read from an Lfm2Config."""

    norm_eps: float
    layer_types: list[str]
    conv_bias: bool
    conv_L_cache: int
    block_auto_adjust_ff_dim: bool
    block_ffn_dim_multiplier: float | None
    block_multiple_of: int


def inner_channels(config: Lfm2Config) -> int:
    """The channels inside the MLP."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = 2 * inner // 3
        if config.block_ffn_dim_multiplier is not None:
            unit = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // unit) * unit
    return inner


class ShortConvolution(Mixer):
    """`out(c * conv(b * x))`, where `in_proj` makes b, c and x. `factor` multiplies its output."""

    readers = ("in_proj",)
    writer = "out_proj"

    def __init__(self, config: Lfm2Config, factor: float) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.conv_bias
        self.size, self.keeps = size, ("conv",) if config.conv_L_cache > 1 else ()
        self.in_proj = Projection(size, 3 * size, "attention", bias)
        self.conv = CausalTaps(size, config.conv_L_cache, bias)
        self.out_proj = Projection(size, size, "attention", bias, factor)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        b, c, x = self.in_proj(x).split(self.size, dim=1)
        x = b * x
        return self.out_proj(c * self.conv(memory["conv"](x) if self.keeps else x))


def author(config: Lfm2Config, options: ResidualOptions) -> Model:
    """The model of an Lfm2Config."""
    scale, size, heads = options.scale, config.hidden_size, heads_of(config)
    kind = LayerKind(heads, rotary_table(config, heads.dim))
    eps, inner = residual_eps(config.norm_eps, scale), inner_channels(config)
    names = PartNames("operator_norm", mlp_norm="ffn_norm", mlp="feed_forward")
    convolved = PartNames("operator_norm", "conv", "ffn_norm", "feed_forward")
    check(config)
    layers = []
    with torch.device("meta"):
        for index, layer_type in enumerate(config.layer_types):
            attends = layer_type == "full_attention"
            mixer: Mixer = (
                Attention(size, config.norm_eps, kind, FORM, scale)
                if attends
                else ShortConvolution(config, scale)
            )
            mlp = MLP(size, inner, "silu", factor=scale, names=MLP_NAMES)
            norm, mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
            own = names if attends else convolved
            layers.append(PreNormBlock(index, norm, mixer, mlp_norm, mlp, own))
    memory = {}
    if "conv" in config.layer_types and config.conv_L_cache > 1:
        memory["conv"] = History(size, config.conv_L_cache - 1)
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if "full_attention" in config.layer_types else [],
        norm="model.embedding_norm.weight",
        eps=config.norm_eps,
        memory=memory,
    )


def check(config: Lfm2Config) -> None:
    """Raise CetaneError for a layer that neither convolves nor attends: transformers has no mask
    for it."""
    for layer_type in config.layer_types:
        if layer_type not in ("conv", "full_attention"):
            raise invalid(
                config.model_type, f"layer_types: {layer_type!r}; known: conv, full_attention"
            )
