"""Models of mixers alone, without MLPs, by the names of Mamba's files."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from cetane.families.base import Block, Truth
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.layers import RMSNorm
from cetane.families.model import History, Matrix, Model, StoredTable
from cetane.families.options import ResidualOptions, residual_eps

NAMES = PartNames(norm="norm", mixer="mixer", layers="backbone.layers")
LONGEST = 1 << 20
"""Where a port's context ends. The model has no end, and keeps the same matrices of any text."""


class MixersConfig(DecoderConfig, Protocol):
    """The keys that are read from the config of any such model."""

    num_hidden_layers: int
    hidden_act: str
    layer_norm_epsilon: float
    state_size: int
    conv_kernel: int
    use_conv_bias: bool
    use_bias: bool
    """Whether projections of input and output have biases."""


class MixerBlock(PreNormBlock):
    """A layer."""

    def truths(self) -> dict[str, Truth]:
        return Block.truths(self)


def mixers_alone(
    config: MixersConfig,
    options: ResidualOptions,
    block: type[MixerBlock],
    mixer: Callable[[float], Mixer],
    memory: dict[str, History | Matrix],
) -> Model:
    """The model whose layers have each a mixer, which gets the factor on its output, and keep
    `memory`."""
    scale, size, eps = options.scale, config.hidden_size, config.layer_norm_epsilon
    norm = partial(RMSNorm, size, residual_eps(eps, scale))
    with torch.device("meta"):
        layers = [
            block(index, norm(), mixer(scale), names=NAMES, alone=NAMES.mixer)
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
        memory=memory,
    )
