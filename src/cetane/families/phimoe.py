"""Phi-MoE (Phi-3.5-MoE, Phi-mini-MoE): Llama's attention and a mixture of experts, each behind a
LayerNorm. A token takes two experts, one after the other, and weighs each by itself.

The truth is transformers' `modeling_phimoe.py`. With stretched positions, a port's context ends
where the model was trained first: beyond, cosines and sines have another factor.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.axes import Axes
from cetane.families.base import Block
from cetane.families.blocks import PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import TABLE, DecoderConfig, decoder_model, heads_of
from cetane.families.experts import (
    FAR,
    Correction,
    ExpertOptions,
    Mixture,
    MixtureBlock,
    expert_channels,
)
from cetane.families.kinds import LayerKind
from cetane.families.layers import LayerNorm, first_largest, ones_where
from cetane.families.model import Model, Reach, StoredTable
from cetane.families.options import residual_eps
from cetane.families.rotary import RotaryTable, first_positions, rotary_table

Options = ExpertOptions
MODEL_TYPES = ("phimoe",)
CHOSEN = 2
"""The experts of a token, whatever `num_experts_per_tok` says."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class PhimoeConfig(DecoderConfig, Protocol):
    """The keys that are read from a PhimoeConfig."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    lm_head_bias: bool
    sliding_window: int | None
    num_local_experts: int
    router_jitter_noise: float


@dataclass(frozen=True, kw_only=True)
class SparseMixture(Mixture):
    """Experts that are chosen as by SparseMixer-v2 (arXiv 2409.12136).

    A token takes the best expert, and then the best of the others. The weight of each is its share
    among the experts that are near it, of those that could be taken in its place.
    """

    near: float
    """How far below the taken one an expert is near, as a part of the larger of both logits."""
    bounded = True

    def weigh(self, logits: Tensor, axes: Axes, correction: Correction | None = None) -> Tensor:
        first, second = self.taken(logits, axes)
        return self.share(logits, first) + self.share(logits, second, 1 - first)

    def far(self, logits: Tensor, axes: Axes) -> tuple[Tensor, ...]:
        return tuple(self.below(logits, taken)[1] for taken in self.taken(logits, axes))

    def taken(self, logits: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
        """1 for the first expert of each token, and for the second."""
        first = first_largest(logits, self.count, axes)
        return first, first_largest(logits - FAR * first, self.count, axes)

    def below(self, logits: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """How far all experts lie below the taken one of each token, and 1 for those that are not
        near it."""
        most = (logits * taken).sum(1, keepdim=True)
        # No difference: gates put other numbers in place of logits where some are subtracted.
        below = most + logits * -1
        bound = torch.maximum(logits.abs(), most) * self.near
        return below, ones_where(below > bound, below)

    def share(self, logits: Tensor, taken: Tensor, open_to: Tensor | None = None) -> Tensor:
        """The weight of the taken expert of each token; `open_to` has 1 for those that could be
        taken, by default all."""
        below, far = self.below(logits, taken)
        near = 1 - far
        if open_to is not None:
            below, near = below * open_to, near * open_to
        return taken / (near * (below * -1).exp()).sum(1, keepdim=True)


def author(config: PhimoeConfig, options: ExpertOptions) -> Model:
    """The model of a PhimoeConfig."""
    scale, size, eps = options.scale, config.hidden_size, config.rms_norm_eps
    heads, form = heads_of(config), AttentionForm(config.attention_bias, config.attention_bias)
    rotary, reach = positions(config, heads.dim)
    kind, experts = LayerKind(heads, rotary, config.sliding_window), mixture(config, options)
    norm = partial(LayerNorm, size, residual_eps(eps, scale))
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            layers.append(PreNormBlock(index, norm(), Attention(size, eps, kind, form, scale)))
            layers.append(MixtureBlock(experts, index, norm(), "router"))
    return decoder_model(
        config,
        layers,
        scale,
        [kind],
        StoredTable(TABLE, factor=scale),
        reach=reach,
        channels=expert_channels(experts),
        final=LayerNorm,
        output_bias=config.lm_head_bias,
    )


def mixture(config: PhimoeConfig, options: ExpertOptions) -> SparseMixture:
    """The experts of a layer. CetaneError for noise that leaves none."""
    noise = config.router_jitter_noise
    if not noise >= 0:
        raise invalid(config.model_type, f"router_jitter_noise = {noise}, not 0 or more")
    return SparseMixture(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        count=config.num_local_experts,
        chosen=CHOSEN,
        normalised=False,
        act=config.hidden_act,
        together=options.together,
        factor=options.scale,
        near=2 * min(noise, 1.0),  # at 1, all are near
    )


def positions(config: PhimoeConfig, dim: int) -> tuple[RotaryTable, Reach | None]:
    """The rotary table of heads of `dim` channels, and where a context ends. CetaneError for
    stretched positions without a factor or an end."""
    rotary, parameters = rotary_table(config, dim, part=1.0), config.rope_parameters
    if parameters.get("rope_type", "default") == "default":
        return rotary, None
    factor = parameters.get("short_mscale")
    if not isinstance(factor, int | float) or not 0 < factor < torch.finfo(torch.half).max:
        raise invalid(config.model_type, f"short_mscale = {factor!r}, not a positive number")
    if "original_max_position_embeddings" not in parameters:
        raise invalid(config.model_type, "rope_parameters has no original_max_position_embeddings")
    end = min(
        first_positions(config, config.max_position_embeddings), config.max_position_embeddings
    )
    return replace(rotary, scale=float(factor)), (end, "has other rotary tables")
