"""Mamba of 2023 alone (Mamba 130M to 2.8B), and Falcon Mamba 7B, which norms the parts of its scan:
layers without attention and without MLPs.

The truth is transformers' `modeling_mamba.py` and `modeling_falcon_mamba.py`.
"""

from functools import partial
from typing import Protocol

from cetane.families.mixers_alone import MixerBlock, MixersConfig, mixers_alone
from cetane.families.model import Model
from cetane.families.options import ResidualOptions
from cetane.families.selective_scan import ScanForm, ScanRows, SelectiveScan

Options = ResidualOptions
MODEL_TYPES = ("mamba", "falcon_mamba")

__all__ = ["MODEL_TYPES", "Options", "author"]


class MambaConfig(MixersConfig, Protocol):
    """The keys that are read from a MambaConfig or a FalconMambaConfig."""

    time_step_rank: int
    mixer_rms_eps: float
    """Only Falcon Mamba has it."""


class MambaBlock(ScanRows, MixerBlock):
    """A layer."""


def author(config: MambaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    form = scan_form(config)
    return mixers_alone(config, options, MambaBlock, partial(SelectiveScan, form), form.memory)


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
