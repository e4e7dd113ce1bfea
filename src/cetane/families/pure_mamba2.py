"""Mamba-2 alone (Mamba-2 130M to 2.7B, Codestral Mamba): layers without attention and without MLPs.

The truth is transformers' `modeling_mamba2.py`.
"""

from functools import partial
from typing import Protocol

from cetane.families.mamba2 import Mamba2, Mamba2Form, MambaRows, grouped, step_bounds
from cetane.families.mixers_alone import MixerBlock, MixersConfig, mixers_alone
from cetane.families.model import Model
from cetane.families.options import ResidualOptions

Options = ResidualOptions
MODEL_TYPES = ("mamba2",)

__all__ = ["MODEL_TYPES", "Options", "author"]


class PureMamba2Config(MixersConfig, Protocol):
    """The keys that are read from a Mamba2Config."""

    num_heads: int
    head_dim: int
    n_groups: int
    time_step_limit: tuple[float, float]


class PureMamba2Block(MambaRows, MixerBlock):
    """A layer."""


def author(config: PureMamba2Config, options: ResidualOptions) -> Model:
    """The model of a Mamba2Config."""
    form = mamba2_form(config)
    return mixers_alone(config, options, PureMamba2Block, partial(Mamba2, form), form.memory)


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
