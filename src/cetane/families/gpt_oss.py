"""gpt-oss: every second layer slides, and scores have a sink for each head. A token takes a few of
many gated experts, which have biases and bounds.

The truth is transformers' `modeling_gpt_oss.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    MixtureExperts,
    StackedRows,
    columns_of,
    expert_channels,
    mixture_of,
)
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import Projection
from cetane.families.model import Model
from cetane.families.rotary import rotary_table
from cetane.families.stored import SinkBlock

Options = ExpertOptions
MODEL_TYPES = ("gpt_oss",)

__all__ = ["MODEL_TYPES", "Options", "author"]


class GptOssConfig(DecoderConfig, Protocol):
    """The keys that are read from a GptOssConfig."""

    head_dim: int
    hidden_act: str
    """It has no effect."""
    attention_bias: bool
    sliding_window: int | None
    layer_types: list[str]
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float


class GptOssExperts(MixtureExperts):
    """Experts with biases: `(up + 1) * gate * sigmoid(alpha * gate)`, of bounded gates and ups.

    transformers keeps their matrices transposed, with gates and ups one after the other.
    """

    def __init__(self, alpha: float, limit: float, mixture: Mixture, start: int, stop: int) -> None:
        super().__init__(mixture, start, stop, bias=True)
        self.alpha, self.limit = alpha, limit
        count = stop - start
        self.down_proj_bias = Projection(count, mixture.hidden, None, factor=mixture.factor)
        hidden, inner = mixture.hidden, mixture.inner
        self.stored = {
            "down_proj.weight": StackedRows("down_proj", (inner, hidden), columns_of),
            "down_proj_bias.weight": StackedRows("down_proj_bias", (hidden,), torch.t),
        }
        for first, name in enumerate(("gate_proj", "up_proj")):
            pick = partial(every_second, first)
            whole = (hidden, 2 * inner)
            self.stored[f"{name}.weight"] = StackedRows("gate_up_proj", whole, pick)
            self.stored[f"{name}.bias"] = StackedRows("gate_up_proj_bias", (2 * inner,), pick)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        biases = self.down_proj_bias(weights[:, self.start : self.stop])
        return self.down_proj(self.weighted(inner, weights)) + biases


def every_second(first: int, stored: Tensor) -> Tensor:
    """Every second column of each expert, from `first` on, as rows `(experts * I, H)`; of a bias,
    as a vector."""
    mine = stored[..., first::2]
    return mine.transpose(1, 2).flatten(0, 1) if mine.ndim == 3 else mine.flatten()


def author(config: GptOssConfig, options: ExpertOptions) -> Model:
    """The model of a GptOssConfig."""
    scale, size, bias = options.scale, config.hidden_size, config.attention_bias
    heads, norm = heads_of(config), Norms(config, scale)
    rotary = rotary_table(config, heads.dim)
    names = kind_names(config)
    form = AttentionForm(qkv_bias=bias, out_bias=bias, sinks=True)
    windows = {"sliding": config.sliding_window, "full": None}
    kinds = {
        name: LayerKind(heads, rotary, windows[name], name=name, table=name)
        for name in dict.fromkeys(names)
    }
    mixture = mixture_of(config, options, config.num_local_experts, config.intermediate_size, True)
    mixture = replace(mixture, act="silu")  # hidden_act has no effect: see GptOssExperts
    group = partial(GptOssExperts, config.swiglu_alpha, config.swiglu_limit)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, name in enumerate(names):
            attention = Attention(size, config.rms_norm_eps, kinds[name], form, scale)
            layers.append(SinkBlock(index, norm(), attention))
            layers.append(MixtureBlock(mixture, index, norm(), "router", True, group))
    return decoder_model(config, layers, scale, kinds.values(), channels=expert_channels(mixture))
