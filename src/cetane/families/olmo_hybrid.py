"""OLMo Hybrid: layers of the gated delta rule beside a few that attend. Those that attend are OLMo
2's, with norms behind attention and MLP; the others have norms before. Released models have no
positions.

The truth is transformers' `modeling_olmo_hybrid.py`.
"""

from typing import Protocol

import torch

from cetane.families.base import Block, Weight
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.decoder import Norms, decoder_model, heads_of
from cetane.families.delta import LAYER_TYPES, DeltaConfig, DeltaNet, delta_heads
from cetane.families.kinds import FULL, LayerKind, check_types
from cetane.families.layers import MLP, Held
from cetane.families.model import Model
from cetane.families.olmo2 import OlmoConfig, OlmoLayer
from cetane.families.options import ResidualOptions
from cetane.families.rotary import RotaryTable, rotary_table

Options = ResidualOptions
MODEL_TYPES = ("olmo_hybrid",)
NAMES = PartNames(mixer="linear_attn")
STORED = {
    "in_proj_z": "g_proj", "in_proj_b": "b_proj", "in_proj_a": "a_proj", "norm": "o_norm",
    "out_proj": "o_proj",
}  # fmt: skip
"""The checkpoint's names for parts of the delta rule that `DeltaNet` calls otherwise."""
EPS = 1e-5
"""The epsilon of the norm of answers, whatever the config says of the others."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class OlmoHybridConfig(OlmoConfig, DeltaConfig, Protocol):
    """The keys that are read from an OlmoHybridConfig, beside OLMo 2's."""

    linear_allow_neg_eigval: bool
    """Whether rates of correction are up to 2, not 1."""


class DeltaLayer(PreNormBlock):
    """A layer of the delta rule."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        parts = path.replace(".decays.", ".").split(".")
        if parts[0] == NAMES.mixer:
            parts[1] = STORED.get(parts[1], parts[1])
        return super().weight(".".join(parts), shape, held)


def author(config: OlmoHybridConfig, options: ResidualOptions) -> Model:
    """The model of an OlmoHybridConfig."""
    check_types(config, LAYER_TYPES)
    scale, size, act = options.scale, config.hidden_size, config.hidden_act
    delta, taps = delta_heads(config), config.linear_conv_kernel_dim
    most = 2.0 if config.linear_allow_neg_eigval else 1.0
    kind, norm = attention_kind(config), Norms(config, scale)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(config.layer_types):
            if layer_type == FULL:
                layers.append(OlmoLayer(config, index, kind, scale))
                continue
            mixer = DeltaNet(size, delta, taps, act, EPS, scale, most, apart=True)
            mlp = MLP(size, config.intermediate_size, act, factor=scale)
            layers.append(DeltaLayer(index, norm(), mixer, norm(), mlp, NAMES))
    return decoder_model(config, layers, scale, [kind], memory=delta.memory("delta", taps))


def attention_kind(config: OlmoHybridConfig) -> LayerKind:
    """The kind of the layers that attend: without positions if the config gives no base."""
    heads = heads_of(config)
    if config.rope_parameters.get("rope_theta") is None:
        return LayerKind(heads, RotaryTable(torch.empty(0)), positioned=False)
    return LayerKind(heads, rotary_table(config, heads.dim))
