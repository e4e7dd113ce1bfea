"""Mamba of 2023 alone (Mamba 130M to 2.8B), and Falcon Mamba 7B, which norms the parts of its scan:
layers without attention and without MLPs.

The truth is transformers' `modeling_mamba.py` and `modeling_falcon_mamba.py`.
"""

from functools import partial
from typing import Protocol

import torch

from cetane.families.base import Block, Truth
from cetane.families.blocks import PreNormBlock
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.layers import RMSNorm
from cetane.families.model import Model, StoredTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.pure_mamba2 import LONGEST, NAMES
from cetane.families.selective_scan import ScanForm, ScanRows, SelectiveScan

Options = ResidualOptions
MODEL_TYPES = ("mamba", "falcon_mamba")

__all__ = ["MODEL_TYPES", "Options", "author"]


class MambaConfig(DecoderConfig, Protocol):
    """The keys that are read from a MambaConfig or a FalconMambaConfig."""

    num_hidden_layers: int
    hidden_act: str
    layer_norm_epsilon: float
    state_size: int
    time_step_rank: int
    conv_kernel: int
    use_conv_bias: bool
    use_bias: bool
    """Whether the projections of input and output have biases."""
    mixer_rms_eps: float
    """Only Falcon Mamba has it."""


class MambaBlock(ScanRows, PreNormBlock):
    """A layer."""

    def truths(self) -> dict[str, Truth]:
        return Block.truths(self)


def author(config: MambaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    scale, size, eps = options.scale, config.hidden_size, config.layer_norm_epsilon
    form = scan_form(config)
    norm = partial(RMSNorm, size, residual_eps(eps, scale))
    with torch.device("meta"):
        layers = [
            MambaBlock(index, norm(), SelectiveScan(form, scale), names=NAMES, alone=NAMES.mixer)
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


def scan_form(config: MambaConfig) -> ScanForm:
    """The layers."""
    return ScanForm(
        size=config.hidden_size,
        channels=config.intermediate_size,
        states=config.state_size,
        rank=config.time_step_rank,
        taps=config.conv_kernel,
        act=config.hidden_act,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        norm_eps=config.mixer_rms_eps if config.model_type == "falcon_mamba" else None,
    )
