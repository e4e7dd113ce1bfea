"""GPT-J, and CodeGen: attention and MLP beside each other, behind one LayerNorm. Neighbouring
channels of a head are pairs, and some channels get no position. The head has biases.

CodeGen stores queries, values and keys as one tensor, for each quarter of the heads.

The truth is transformers' `modeling_{model_type}.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Weight
from cetane.families.blocks import PartNames
from cetane.families.configs import head_width, invalid
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import LayerKind
from cetane.families.layers import MLP, Held, LayerNorm, Pick, RowPick
from cetane.families.model import Model, StoredTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import of_base
from cetane.families.stored import InterleavedParallelBlock, parts_of

Options = ResidualOptions
MODEL_TYPES = ("codegen", "gptj")
NAMES = PartNames(norm="ln_1", mixer="attn", mlp_norm="ln_1", layers="transformer.h")
THETA = 10_000.0
"""The base of positions, which no config says."""
QUARTERS = 4
"""The parts in which CodeGen stores its heads."""
IN_QUARTERS = ("q_proj", "v_proj", "k_proj")
"""The projections of a quarter, in CodeGen's order."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class GptJConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    activation_function: str
    layer_norm_epsilon: float
    n_inner: int | None
    rotary_dim: int


class CodeGenBlock(InterleavedParallelBlock):
    """A layer of CodeGen."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        name = path.removeprefix(f"{self.names.mixer}.").removesuffix(".weight")
        if name not in IN_QUARTERS:
            return plain
        size = held.stored[0]
        quarter = (size // QUARTERS,) * len(IN_QUARTERS)
        own = partial(parts_of, QUARTERS, quarter, (IN_QUARTERS.index(name),))
        return replace(
            plain,
            name=plain.name.replace(name, "qkv_proj"),
            stored=(len(IN_QUARTERS) * size, *held.stored[1:]),
            pick=RowPick(own if plain.pick is None else partial(in_turn, own, plain.pick)),
            part=name,
        )


def in_turn(first: Pick, second: Pick, stored: Tensor) -> Tensor:
    """Rows that two picks take, one after the other."""
    return second(first(stored))


def author(config: GptJConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    kind = layer_kind(config)
    scale, size, eps = options.scale, config.hidden_size, config.layer_norm_epsilon
    inner = 4 * size if config.n_inner is None else config.n_inner
    act, form = config.activation_function, AttentionForm(output="out_proj")
    block = CodeGenBlock if config.model_type == "codegen" else InterleavedParallelBlock
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            norm = LayerNorm(size, residual_eps(eps, scale))
            attention = Attention(size, eps, kind, form, scale)
            mlp = MLP(size, inner, act, True, scale, names=("fc_in", "fc_out"))
            layers.append(block(index, norm, attention, norm, mlp, NAMES))
    return decoder_model(
        config,
        layers,
        scale,
        [kind],
        StoredTable("transformer.wte.weight", factor=scale),
        norm="transformer.ln_f.weight",
        eps=eps,
        final=LayerNorm,
        output_bias=True,
    )


def layer_kind(config: GptJConfig) -> LayerKind:
    """The kind of all layers. CetaneError for heads that transformers cannot run."""
    kind, heads, size = config.model_type, config.num_attention_heads, config.hidden_size
    dim, width = head_width(kind, size, heads), config.rotary_dim
    if kind == "codegen" and heads % QUARTERS:
        raise invalid(kind, f"{heads} heads are not a multiple of {QUARTERS}")
    if width % 2 or width > dim:
        raise invalid(kind, f"rotary_dim = {width}, not an even number up to {dim}, a head's width")
    return LayerKind(AttentionHeads(heads, heads, dim, dim**-0.5), of_base(THETA, width))
