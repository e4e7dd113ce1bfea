"""Mamba-2 alone (Mamba-2 130M to 2.7B, Codestral Mamba): layers without attention and without MLPs.

The truth is transformers' `modeling_mamba2.py`.
"""

from functools import partial
from typing import Protocol

import torch

from cetane.families.base import Block, Truth
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.layers import RMSNorm
from cetane.families.mamba2 import Mamba2, Mamba2Form, MambaRows, grouped, step_bounds
from cetane.families.model import Model, StoredTable
from cetane.families.options import ResidualOptions, residual_eps

Options = ResidualOptions
MODEL_TYPES = ("mamba2",)
NAMES = PartNames(norm="norm", mixer="mixer", layers="backbone.layers")
LONGEST = 1 << 20
"""Where a port's context ends. The model has no end, and keeps the same matrices of any text."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class PureMamba2Config(DecoderConfig, Protocol):
    """The keys that are read from a Mamba2Config."""

    num_hidden_layers: int
    hidden_act: str
    layer_norm_epsilon: float
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    use_conv_bias: bool
    use_bias: bool
    """Whether projections have biases."""
    time_step_limit: tuple[float, float]


class PureMamba2Block(MambaRows, PreNormBlock):
    """A layer."""

    def truths(self) -> dict[str, Truth]:
        return Block.truths(self)


def author(config: PureMamba2Config, options: ResidualOptions) -> Model:
    """The model of a Mamba2Config."""
    scale, size, eps = options.scale, config.hidden_size, config.layer_norm_epsilon
    form = mamba2_form(config)
    norm = partial(RMSNorm, size, residual_eps(eps, scale))
    with torch.device("meta"):
        layers = [
            PureMamba2Block(index, norm(), Mamba2(form, scale), names=NAMES, alone=NAMES.mixer)
            for index in range(config.num_hidden_layers)
        ]
    return decoder_model(
        config,
        layers,
        scale,
        [],
        StoredTable("backbone.embeddings.weight", factor=scale),
        norm="backbone.norm_f.weight",
        eps=eps,
        reach=(LONGEST, None),
        memory=form.memory,
    )


def mamba2_form(config: PureMamba2Config) -> Mamba2Form:
    """The layers."""
    kind, heads, groups = config.model_type, config.num_heads, config.n_groups
    return Mamba2Form(
        size=config.hidden_size,
        heads=grouped(kind, heads, groups, config.state_size, config.head_dim),
        taps=config.conv_kernel,
        act=config.hidden_act,
        eps=config.layer_norm_epsilon,
        bounds=step_bounds(kind, *config.time_step_limit),
        bias=config.use_bias,
        out_bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )
