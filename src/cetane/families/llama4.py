"""Llama 4, the text part: each token takes one expert of many, beside one that all tokens share.
Some layers give queries and keys no positions; the others norm the heads of both.

The truth is transformers' `modeling_llama4.py`. A port's longest context ends where attention in
chunks and a factor on late queries would begin: after 8,191 tokens in the released models.
"""

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block
from cetane.families.blocks import PartNames
from cetane.families.configs import invalid, unsupported
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    MixtureExperts,
    SharedExpert,
    StackedRows,
    columns_of,
    expert_channels,
    mixture_of,
)
from cetane.families.kinds import FULL, LayerKind
from cetane.families.layers import MLP
from cetane.families.model import Model, Reach
from cetane.families.rotary import rotary_table
from cetane.families.stored import InterleavedBlock

Options = ExpertOptions
MODEL_TYPES = ("llama4_text",)
CHUNKED = "chunked_attention"

__all__ = ["MODEL_TYPES", "Options", "author"]


class Llama4Config(DecoderConfig, Protocol):
    """The keys that are read from a Llama4TextConfig."""

    head_dim: int
    hidden_act: str
    attention_bias: bool
    intermediate_size_mlp: int
    num_hidden_layers: int
    num_local_experts: int
    num_experts_per_tok: int
    moe_layers: list[int]
    use_qk_norm: bool
    no_rope_layers: list[int]
    layer_types: list[str]
    attention_chunk_size: int | None
    attn_temperature_tuning: bool
    floor_scale: int


class Llama4Experts(MixtureExperts):
    """Experts whose input is weighed, not their output: `down(act(gate(w x)) * up(w x))`.

    transformers keeps their matrices transposed, gates before ups.
    """

    def __init__(self, mixture: Mixture, start: int, stop: int) -> None:
        super().__init__(mixture, start, stop)
        hidden, inner = mixture.hidden, mixture.inner
        self.stored = {"down_proj.weight": StackedRows("down_proj", (inner, hidden), columns_of)}
        for name, first in (("gate_proj", 0), ("up_proj", inner)):
            pick = partial(columns_as_rows, first, first + inner)
            both = StackedRows("gate_up_proj", (hidden, 2 * inner), pick)
            self.stored[f"{name}.weight"] = both

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = (self.weighted(part(x), weights) for part in (self.gate_proj, self.up_proj))
        return self.down_proj(self.act(gate) * up)


def columns_as_rows(start: int, stop: int, stored: Tensor) -> Tensor:
    """Some columns of each expert, as rows `(experts * I, H)`."""
    return stored[..., start:stop].transpose(1, 2).flatten(0, 1)


def author(config: Llama4Config, options: ExpertOptions) -> Model:
    """The model of a Llama4TextConfig."""
    check(config)
    scale, size, bias = options.scale, config.hidden_size, config.attention_bias
    heads, norm, eps = heads_of(config), Norms(config, scale), config.rms_norm_eps
    rotary, act = rotary_table(config, heads.dim), config.hidden_act
    if config.use_qk_norm:  # transformers norms last, so a factor of the table is lost
        eps, rotary = eps / rotary.scale**2, replace(rotary, scale=1.0)
    inner, wide = config.intermediate_size, config.intermediate_size_mlp
    kinds = [LayerKind(heads, rotary, positioned=bool(one)) for one in config.no_rope_layers]
    count = config.num_local_experts
    mixture = mixture_of(config, options, count, inner, normalised=False, sigmoid=True)
    names = PartNames(mlp="feed_forward")
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            normed = config.use_qk_norm and kind.positioned
            form = AttentionForm(qkv_bias=bias, out_bias=bias, norms="unit" if normed else "none")
            attention = Attention(size, eps, kind, form, scale)
            if index not in config.moe_layers:
                mlp = MLP(size, wide, act, factor=scale)
                layers.append(InterleavedBlock(index, norm(), attention, norm(), mlp, names))
                continue
            shared = SharedExpert(size, inner, act, scale)
            layers.append(InterleavedBlock(index, norm(), attention, names=names))
            layers.append(
                MixtureBlock(
                    mixture,
                    index,
                    norm(),
                    "router",
                    group=Llama4Experts,
                    shared=shared,
                    shared_name="feed_forward.shared_expert",
                    names=names,
                )
            )
    return decoder_model(
        config,
        layers,
        scale,
        kinds,
        reach=reach(config),
        channels=expert_channels(mixture),
    )


def reach(config: Llama4Config) -> Reach:
    """The positions at which all layers see everything, and no query has a factor."""
    limits: list[Reach] = [(config.max_position_embeddings, None)]
    if CHUNKED in config.layer_types and config.attention_chunk_size is not None:
        limits.append((config.attention_chunk_size, "attends in chunks"))
    if config.attn_temperature_tuning and not all(config.no_rope_layers):
        if config.floor_scale == 1:
            raise unsupported(
                config.model_type, "floor_scale = 1, a factor on the queries of all tokens"
            )
        limits.append((config.floor_scale - 1, "multiplies queries by a factor"))
    return min(limits, key=itemgetter(0))


def check(config: Llama4Config) -> None:
    """Raise CetaneError for a config that transformers cannot run."""
    kind, types = config.model_type, config.layer_types
    if len(config.no_rope_layers) != config.num_hidden_layers:
        raise invalid(kind, f"no_rope_layers has {len(config.no_rope_layers)} entries")
    for layer_type in types:
        if layer_type not in (CHUNKED, FULL):
            raise invalid(kind, f"layer_types: {layer_type!r}; known: {CHUNKED}, {FULL}")
    if CHUNKED in types and config.attention_chunk_size is None:
        raise invalid(kind, "attention_chunk_size = None, but some layers attend in chunks")
