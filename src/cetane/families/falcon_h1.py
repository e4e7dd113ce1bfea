"""Falcon-H1: attention and Mamba-2 beside each other in every layer, behind one norm, and an MLP.
Multipliers are on what most projections read or make; the port has them in its weights.

The truth is transformers' `modeling_falcon_h1.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Weight
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.kinds import LayerKind
from cetane.families.layers import MLP, Held, Pick
from cetane.families.mamba2 import Gating, Mamba2, Mamba2Config, MambaRows, mamba2_form
from cetane.families.model import Model
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table

Options = ResidualOptions
MODEL_TYPES = ("falcon_h1",)
NAMES = PartNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward")
MIXER = "mamba"
"""The name of what stands beside attention."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class FalconH1Config(DecoderConfig, Mamba2Config, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    model_type: str
    hidden_size: int
    rms_norm_eps: float
    num_hidden_layers: int
    attention_bias: bool
    mlp_bias: bool
    projectors_bias: bool
    mamba_rms_norm: bool
    mamba_norm_before_gate: bool
    embedding_multiplier: float
    lm_head_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    key_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    ssm_multipliers: list[float]
    """Of gates, values, keys, queries and steps."""
    mlp_multipliers: list[float]
    """Of gates, and of the output."""


class FalconH1Block(MambaRows, PreNormBlock):
    """A layer with two mixers. `made` are the factors on what projections make, by their paths;
    `taps` those on values, keys and queries before the convolution, whose taps have them."""

    def __init__(
        self,
        index: int,
        norm: Norms,
        attention: Attention,
        mamba: Mamba2,
        mlp: MLP,
        made: Mapping[str, float],
        taps: Sequence[float],
    ) -> None:
        super().__init__(index, norm(), attention, norm(), mlp, NAMES)
        self.add_module(MIXER, mamba)
        self.keeps = (*attention.keeps, *mamba.keeps)
        self.made, self.taps = made, partial(multiplied, mamba.sizes, taps)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        if path == f"{MIXER}.conv1d.weight" and plain.pick is not None:
            return replace(plain, pick=partial(self.taps, plain.pick))
        return replace(plain, factor=plain.factor * self.made.get(path.rpartition(".")[0], 1.0))

    def mixed(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        return super().mixed(x, flow, memory) + self.part(MIXER)(x, flow, memory)

    def behind(self) -> dict[str, tuple[str, ...]]:
        return super().behind() | {self.names.norm: (self.names.mixer, MIXER)}


def multiplied(sizes: list[int], factors: Sequence[float], pick: Pick, stored: Tensor) -> Tensor:
    """The picked taps of some parts of channels, each part times its factor, in fp32."""
    parts = pick(stored).float().split(sizes)
    return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)])


def author(config: FalconH1Config, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    scale, size, eps = options.scale, config.hidden_size, config.rms_norm_eps
    heads, norm = heads_of(config), Norms(config, scale)
    space = mamba2_form(config, config.projectors_bias, gating(config))
    form = AttentionForm(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    kind = LayerKind(heads, rotary_table(config, heads.dim))
    gates, *convolved, steps = config.ssm_multipliers
    gate, down = config.mlp_multipliers
    made = {
        "self_attn.k_proj": config.key_multiplier,
        f"{MIXER}.in_proj_z": gates,
        f"{MIXER}.in_proj_dt": steps,
        f"{NAMES.mlp}.gate_proj": gate,
    }
    attended, answered = scale * config.attention_out_multiplier, scale * config.ssm_out_multiplier
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            attention = Attention(
                size, eps, kind, form, attended, inverse=1 / config.attention_in_multiplier
            )
            mamba = Mamba2(space, answered, inverse=1 / config.ssm_in_multiplier)
            inner, act, factor = config.intermediate_size, config.hidden_act, scale * down
            mlp = MLP(size, inner, act, config.mlp_bias, factor)
            layers.append(FalconH1Block(index, norm, attention, mamba, mlp, made, convolved))
    return decoder_model(
        config,
        layers,
        scale,
        [kind],
        embedding=config.embedding_multiplier,
        logits=config.lm_head_multiplier,
        norm="model.final_layernorm.weight",
        memory=space.memory,
    )


def gating(config: FalconH1Config) -> Gating:
    """How gates and norms of Mamba-2's answers follow each other."""
    if not config.mamba_rms_norm:
        return "unnormed"
    return "last" if config.mamba_norm_before_gate else "first"


def check(config: FalconH1Config) -> None:
    """Raise CetaneError for lists of multipliers that are too short or too long."""
    for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
        found = len(getattr(config, name))
        if found != count:
            raise invalid(config.model_type, f"{name} has {found} entries, not {count}")
