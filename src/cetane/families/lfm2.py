"""LFM2: short convolutions with gates, and attention with normed queries and keys in some layers.
LFM2-MoE has an MLP behind the first of them, and experts behind the others. LFM3 has gates on
attention heads, layers that slide, and norms after convolution, attention and MLP.

A convolution keeps the last columns of its gated input: a history. The truth is transformers'
`modeling_{model_type}.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory
from cetane.families.blocks import Mixer, PreNormBlock, SandwichBlock, SandwichNames
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, decoder_model, heads_of
from cetane.families.experts import ExpertOptions, Mixture, MixtureBlock, expert_channels
from cetane.families.kinds import FULL, KINDS, SLIDING, LayerKind, check_types
from cetane.families.layers import MLP, CausalTaps, Projection, RMSNorm
from cetane.families.model import History, Model
from cetane.families.options import residual_eps
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("lfm2", "lfm2_moe", "lfm3")
LAYER_TYPES = ("conv", FULL, SLIDING)
"""The types of layers. Only LFM3 has the last."""

FORM = AttentionForm(norms="head", output="out_proj", normed=("q_layernorm", "k_layernorm"))
NAMES = SandwichNames(
    norm="operator_norm",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    after="post_operator_norm",
    mlp_after="post_ffn_norm",
)
CONVOLVED = replace(NAMES, mixer="conv")
"""The names of a layer that convolves."""
MLP_NAMES = "w1", "w3", "w2"
ACT = "silu"
ADDED = 1e-6
"""What is added to the sum of the weights of a token's experts."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class Lfm2Config(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    norm_eps: float
    layer_types: list[str]
    conv_bias: bool
    conv_L_cache: int
    block_auto_adjust_ff_dim: bool
    block_ffn_dim_multiplier: float | None
    block_multiple_of: int
    """Only LFM2 has the last three."""
    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float
    """Only LFM2-MoE has these seven."""
    sliding_window: int | None
    attention_bias: bool
    use_attention_gate: bool
    use_sandwich_norm: bool
    """Only LFM3 has the last four."""


def inner_channels(config: Lfm2Config) -> int:
    """The channels inside the MLP."""
    inner = config.intermediate_size
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        inner = 2 * inner // 3
        if config.block_ffn_dim_multiplier is not None:
            unit = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // unit) * unit
    if inner < 1:
        raise invalid(config.model_type, f"an MLP has {inner} inner channels")
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


def dense_layers(config: Lfm2Config) -> int:
    """The number of layers before the first with experts."""
    layers = len(config.layer_types)
    return min(config.num_dense_layers, layers) if config.model_type == "lfm2_moe" else layers


def mixture(config: Lfm2Config, options: ExpertOptions) -> Mixture:
    """The experts of a layer."""
    return Mixture(
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        normalised=config.norm_topk_prob,
        act=ACT,
        together=options.together,
        factor=options.scale * config.routed_scaling_factor,
        sigmoid=True,
        added=ADDED,
    )


def layer_kinds(config: Lfm2Config) -> dict[str, LayerKind]:
    """The kinds of the layers that attend, by their types. Those of LFM3 have a rotary table each,
    of whole heads."""
    heads, types = heads_of(config), dict.fromkeys(config.layer_types)
    if config.model_type == "lfm3":
        return {
            one: LayerKind(
                heads,
                rotary_table(config, heads.dim, one, part=1.0),
                config.sliding_window if name == "sliding" else None,
                name=name,
                table=name,
            )
            for one, name in KINDS.items()
            if one in types
        }
    return {one: LayerKind(heads, rotary_table(config, heads.dim)) for one in types if one in KINDS}


def attention_form(config: Lfm2Config) -> AttentionForm:
    """The form of the layers that attend."""
    if config.model_type != "lfm3":
        return FORM
    bias, gated = config.attention_bias, config.use_attention_gate
    gates: Literal["head"] | None = "head" if gated else None
    return AttentionForm(bias, bias, norms="head", gates=gates, gate="g_proj")


def author(config: Lfm2Config, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check_types(config, LAYER_TYPES if config.model_type == "lfm3" else LAYER_TYPES[:2])
    scale, size, eps = options.scale, config.hidden_size, config.norm_eps
    kinds, form, inner = layer_kinds(config), attention_form(config), inner_channels(config)
    around = config.model_type == "lfm3" and config.use_sandwich_norm
    factor = 1.0 if around else scale  # behind a norm, its gains have the factor
    norm = partial(RMSNorm, size, residual_eps(eps, scale))
    after = partial(RMSNorm, size, eps, factor=scale)
    dense = dense_layers(config)
    experts = mixture(config, options) if dense < len(config.layer_types) else None
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(config.layer_types):
            kind = kinds.get(layer_type)
            names = NAMES if kind else CONVOLVED
            mixer: Mixer = (
                Attention(size, eps, kind, form, factor)
                if kind
                else ShortConvolution(config, factor)
            )
            if experts is None or index < dense:
                mlp = MLP(size, inner, ACT, factor=factor, names=MLP_NAMES)
                layers.append(
                    SandwichBlock(index, mixer, mlp, norm, after, names)
                    if around
                    else PreNormBlock(index, norm(), mixer, norm(), mlp, names)
                )
            else:
                correction = "expert_bias" if config.use_expert_bias else None
                layers.append(PreNormBlock(index, norm(), mixer, names=names, alone="mix"))
                layers.append(
                    MixtureBlock(experts, index, norm(), names=names, correction=correction)
                )
    memory = {}
    if "conv" in config.layer_types and config.conv_L_cache > 1:
        memory["conv"] = History(size, config.conv_L_cache - 1)
    return decoder_model(
        config,
        layers,
        scale,
        kinds.values(),
        norm="model.embedding_norm.weight",
        eps=eps,
        memory=memory,
        channels=expert_channels(experts),
    )
