"""Models that know positions by distance alone: the scores of each head fall with it by a slope of
its own (ALiBi, arXiv 2108.12409).

- BLOOM stores queries, keys and values as one tensor, head by head, and norms the embedding;
- MPT stores them one after the other, and may bound them. It has no biases.

The truth is transformers' `modeling_bloom.py` and `modeling_mpt.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Weight
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.configs import check_value, head_width, unsupported
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import FARTHEST, LayerKind
from cetane.families.layers import MLP, UNGATED, Held, LayerNorm
from cetane.families.model import Model, Reach, StoredTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import RotaryTable
from cetane.families.stored import FUSED, FusedRows, HeadedRows

Options = ResidualOptions
MODEL_TYPES = ("bloom", "mpt")
STEEPEST = 8
"""The slopes of a power of two of heads are 2^-x for as many x, evenly spaced up to this one."""
LONGEST = int(FARTHEST)
TRAINED = {
    "alibi": True, "alibi_bias_max": STEEPEST, "attn_type": "multihead_attention",
    "prefix_lm": False, "qk_ln": False,
}  # fmt: skip
"""The keys of an MPT's attention that transformers does not heed, and the values that it takes."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class AttentionConfig(Protocol):
    """The keys that are read from an MPT's `attn_config`, beside those of `TRAINED`."""

    clip_qkv: float | None
    softmax_scale: float | None


class AlibiConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`; transformers knows those of
    `DecoderConfig` by the names that files have."""

    num_hidden_layers: int
    layer_norm_epsilon: float
    apply_residual_connection_post_layernorm: bool
    """Only BLOOM has it."""
    attn_config: AttentionConfig
    logit_scale: float | str | None
    max_seq_len: int
    """Only MPT has the last three."""


class BloomBlock(HeadedRows, PreNormBlock):
    """A layer of BLOOM. The first one norms the embedding, `first`, before all else."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.first: LayerNorm | None = None

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        own = f"{self.prefix}first."
        if not plain.name.startswith(own):
            return plain
        leaf = plain.name.removeprefix(own)
        return replace(plain, name=f"transformer.word_embeddings_layernorm.{leaf}")

    def forward(self, flow: Flow, memory: Memory) -> None:
        if self.first is not None:
            flow["hidden"] = self.first(flow["hidden"])
        super().forward(flow, memory)


class MptBlock(FusedRows, PreNormBlock):
    """A layer of MPT."""

    fused: tuple[str, ...] = ("Wqkv",)
    parts: Mapping[str, tuple[str, ...]] = FUSED | {"Wqkv": Attention.readers}


@dataclass(frozen=True)
class Traits:
    """What differs between the models."""

    form: AttentionForm
    slopes: tuple[float, ...]
    reach: Reach
    block: type[PreNormBlock]
    names: PartNames
    table: str
    norm: str
    """The names of the embedding and of the final norm."""
    act: str
    mlp_names: tuple[str, ...]
    bias: bool
    """Whether norms and the MLP have biases."""
    scale: float | None = None
    """The factor on scores; None for one over the root of a head's width."""


def traits(config: AlibiConfig) -> Traits:
    """The traits of a config."""
    return bloom(config) if config.model_type == "bloom" else mpt(config)


def bloom(config: AlibiConfig) -> Traits:
    """A BLOOM. CetaneError for one whose residual stream is normed."""
    if config.apply_residual_connection_post_layernorm:
        raise unsupported(config.model_type, "apply_residual_connection_post_layernorm = True")
    return Traits(
        AttentionForm(True, True, output="dense"),
        bloom_slopes(config.num_attention_heads),
        (LONGEST, "goes on"),
        BloomBlock,
        PartNames(mixer="self_attention", layers="transformer.h"),
        "transformer.word_embeddings.weight",
        "transformer.ln_f.weight",
        "gelu_pytorch_tanh",
        ("dense_h_to_4h", "dense_4h_to_h"),
        bias=True,
    )


def mpt(config: AlibiConfig) -> Traits:
    """An MPT. CetaneError for one that transformers takes for another."""
    kind, own = config.model_type, config.attn_config
    if config.logit_scale is not None:
        raise unsupported(kind, f"logit_scale = {config.logit_scale}")
    for key, value in TRAINED.items():
        if getattr(own, key) != value:
            raise unsupported(kind, f"attn_config: {key} = {getattr(own, key)}")
    clip, longest = own.clip_qkv or None, config.max_seq_len
    if clip is not None:
        check_value(kind, "clip_qkv", clip)
    return Traits(
        AttentionForm(clip=clip, output="out_proj"),
        mpt_slopes(config.num_attention_heads),
        (longest, None) if longest <= LONGEST else (LONGEST, "goes on"),
        MptBlock,
        PartNames("norm_1", "attn", "norm_2", "ffn", "transformer.blocks"),
        "transformer.wte.weight",
        "transformer.norm_f.weight",
        "gelu",
        UNGATED,
        bias=False,
        scale=own.softmax_scale,
    )


def slopes_of(heads: int) -> tuple[float, ...]:
    """The slopes of a power of two of heads."""
    return tuple(2.0 ** (-STEEPEST * number / heads) for number in range(1, heads + 1))


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Those of a BLOOM's heads: of the power of two below, and every other one of the next."""
    below = 1 << heads.bit_length() - 1
    return slopes_of(below) + slopes_of(2 * below)[::2][: heads - below]


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """Those of an MPT's heads: every other one of the power of two above, then the others."""
    above = slopes_of(1 << (heads - 1).bit_length())
    return above if len(above) == heads else (above[1::2] + above[::2])[:heads]


def author(config: AlibiConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own, scale, size = traits(config), options.scale, config.hidden_size
    eps, count = config.layer_norm_epsilon, config.num_hidden_layers
    final: Any = partial(LayerNorm, bias=own.bias)
    norm = partial(final, size, residual_eps(eps, scale))
    kind = layer_kind(config, own)
    layers: list[PreNormBlock] = []
    with torch.device("meta"):
        for index in range(count):
            attention = Attention(size, eps, kind, own.form, scale)
            mlp = MLP(size, 4 * size, own.act, own.bias, scale, names=own.mlp_names)
            layers.append(own.block(index, norm(), attention, norm(), mlp, own.names))
        if isinstance(layers[0], BloomBlock):
            layers[0].first = norm(factor=scale)
    blocks: list[Block] = [*layers]
    return decoder_model(
        config, blocks, scale, [kind], StoredTable(own.table, factor=scale), norm=own.norm,
        eps=eps, reach=own.reach, final=final,
    )  # fmt: skip


def layer_kind(config: AlibiConfig, own: Traits) -> LayerKind:
    """The kind of every layer. Queries and keys have no positions."""
    count = config.num_attention_heads
    dim = head_width(config.model_type, config.hidden_size, count)
    scale = dim**-0.5 if own.scale is None else own.scale
    heads, none = AttentionHeads(count, count, dim, scale), RotaryTable(torch.empty(0))
    return LayerKind(heads, none, positioned=False, slopes=own.slopes)
