"""GPT-2 and its relatives: positions are learned rows, which are added to the embedding's.

- GPT-2 stores its matrices transposed, and queries, keys and values as one;
- GPT-BigCode (StarCoder of 2023, SantaCoder) stores the three as one too. All query heads may share
  one key and value;
- GPT-Neo does neither, and does not scale scores. Some of its layers have a window;
- OPT does neither. Its first position is row 2 of its table.

The truth is transformers' `modeling_{model_type}.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Spaces, Weight
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.configs import head_width, unsupported
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import LayerKind
from cetane.families.layers import MLP, Exchange, Held, LayerNorm, RowPick
from cetane.families.model import Model, StoredTable, TokenTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import RotaryTable
from cetane.families.stored import FUSED, HeadedRows, rows_between
from cetane.schema.interface import PositionRows

Options = ResidualOptions
MODEL_TYPES = ("gpt2", "gpt_bigcode", "gpt_neo", "opt")
POSITIONS = "positions"
"""The name of the positions' table, and of the tensor that the first layer reads."""
GPTS = PartNames(norm="ln_1", mixer="attn", mlp_norm="ln_2", layers="transformer.h")
"""The names in GPT-2, GPT-BigCode and GPT-Neo."""
OPTS = PartNames(
    norm="self_attn_layer_norm", mlp_norm="final_layer_norm", layers="model.decoder.layers"
)
"""OPT's names."""
WIDER = ("c_fc", "c_proj")
"""The names of an MLP's projections in these three."""
OPT_EPS = 1e-5
"""What torch has, and no config."""
OPT_FIRST = 2
"""The row of OPT's first position."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class Gpt2Config(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`; transformers knows those of
    `DecoderConfig` by the names that files have."""

    num_hidden_layers: int
    activation_function: str
    layer_norm_epsilon: float
    """OPT has none."""
    n_inner: int | None
    scale_attn_weights: bool
    """Only GPT-2 and GPT-BigCode have the last two."""
    scale_attn_by_inverse_layer_idx: bool
    """Only GPT-2 has it."""
    multi_query: bool
    """Only GPT-BigCode has it."""
    attention_layers: list[str]
    window_size: int
    """Only GPT-Neo has the last two."""
    ffn_dim: int
    word_embed_proj_dim: int
    do_layer_norm_before: bool
    _remove_final_layer_norm: bool
    enable_bias: bool
    layer_norm_elementwise_affine: bool
    """Only OPT has the last six."""


class LearnedBlock(PreNormBlock):
    """A layer of a model with learned positions. The first one adds them to the embedding."""

    def __init__(self, index: int, *parts: Any) -> None:
        super().__init__(index, *parts)
        if index == 0:
            self.reads = (*self.reads, POSITIONS)

    def forward(self, flow: Flow, memory: Memory) -> None:
        if POSITIONS in self.reads:
            flow["hidden"] = flow["hidden"] + flow[POSITIONS]
        super().forward(flow, memory)


class Gpt2Block(LearnedBlock):
    """A layer of GPT-2. Nothing changes the order or the size of its channels: that would have to
    know the transposed matrices."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        module, _, leaf = path.rpartition(".")
        parts, name = FUSED["c_attn"], module.rpartition(".")[2]
        if leaf == "bias" and name in parts:
            size, at = held.stored[0], parts.index(name)
            rows = at * size, (at + 1) * size
            whole = plain.name.replace(name, "c_attn")
            return replace(plain, name=whole, stored=(3 * size,), rows=rows)
        if len(held.stored) != 2:
            return plain
        outputs, inputs = held.stored
        whole, count, at = plain.name, 1, 0
        if name in parts:
            whole, count, at = whole.replace(name, "c_attn"), 3, parts.index(name)
        pick = partial(rows_between, at * outputs, (at + 1) * outputs)
        return replace(
            plain,
            name=whole,
            stored=(inputs, count * outputs),
            pick=RowPick(pick, transposed=True),
            part=name,
        )

    def exchanges(self) -> tuple[Exchange, ...]:
        return ()

    def spaces(self) -> Spaces | None:
        return None


class BigCodeBlock(HeadedRows, LearnedBlock):
    """A layer of GPT-BigCode. With one key for all queries, there is one group of rows."""

    headed = "c_attn"


class NeoBlock(LearnedBlock):
    """A layer of GPT-Neo."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("attn.", "attn.attention."), shape, held)


class OptBlock(LearnedBlock):
    """A layer of OPT."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.removeprefix("mlp."), shape, held)


BLOCKS = {"gpt2": Gpt2Block, "gpt_bigcode": BigCodeBlock, "gpt_neo": NeoBlock, "opt": OptBlock}
"""The layers of each model type."""


@dataclass(frozen=True)
class Traits:
    """What differs between the models."""

    form: AttentionForm
    block: Callable[..., LearnedBlock]
    names: PartNames
    mlp_names: tuple[str, ...]
    inner: int
    eps: float
    table: str
    positions: str
    norm: str
    """The names of the embedding, of the positions' table and of the final norm."""
    first: int = 0
    """The row of the first position."""
    affine: bool = True
    """Whether norms have weights and biases."""
    mlp_bias: bool = True


def traits(config: Gpt2Config) -> Traits:
    """The traits of a config."""
    if config.model_type == "opt":
        own = config.enable_bias
        return Traits(
            AttentionForm(own, own, output="out_proj"),
            BLOCKS["opt"],
            OPTS,
            ("fc1", "fc2"),
            config.ffn_dim,
            OPT_EPS,
            "model.decoder.embed_tokens.weight",
            "model.decoder.embed_positions.weight",
            "model.decoder.final_layer_norm.weight",
            OPT_FIRST,
            config.layer_norm_elementwise_affine,
            own,
        )
    neo = config.model_type == "gpt_neo"
    inner = config.intermediate_size if neo else config.n_inner
    return Traits(
        AttentionForm(not neo, True, output="out_proj" if neo else "c_proj"),
        BLOCKS[config.model_type],
        GPTS,
        WIDER,
        4 * config.hidden_size if inner is None else inner,
        config.layer_norm_epsilon,
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
    )


def author(config: Gpt2Config, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size = traits(config), options.scale, config.hidden_size
    final = partial(LayerNorm, weight=own.affine, bias=own.affine)
    norm = partial(final, size, residual_eps(own.eps, scale))
    kinds, act = layer_kinds(config), config.activation_function
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            attention = Attention(size, own.eps, kind, own.form, scale)
            mlp = MLP(size, own.inner, act, own.mlp_bias, scale, names=own.mlp_names)
            layers.append(own.block(index, norm(), attention, norm(), mlp, own.names))
    count = config.max_position_embeddings
    rows = StoredTable(own.positions, factor=scale, first=own.first)
    return decoder_model(
        config, layers, scale, kinds, StoredTable(own.table, factor=scale),
        norm=own.norm, eps=own.eps, host={POSITIONS: PositionRows(table=POSITIONS)},
        channels={POSITIONS: size}, tables={POSITIONS: TokenTable(count, size, rows)}, final=final,
    )  # fmt: skip


def check(config: Gpt2Config) -> None:
    """Raise CetaneError for heads that are not as wide together as the residual stream, which
    transformers cannot run, and for an OPT that is not supported: that of 350M parameters."""
    kind, size = config.model_type, config.hidden_size
    head_width(kind, size, config.num_attention_heads)
    if kind != "opt":
        return
    if not config.do_layer_norm_before:
        raise unsupported(kind, "do_layer_norm_before = False, as OPT-350M has")
    if config._remove_final_layer_norm:
        raise unsupported(kind, "_remove_final_layer_norm = True")
    if config.word_embed_proj_dim != size:
        raise unsupported(kind, f"word_embed_proj_dim = {config.word_embed_proj_dim}, not {size}")


def layer_kinds(config: Gpt2Config) -> list[LayerKind]:
    """The kind of every layer. Queries and keys have no positions."""
    kind, count, heads = config.model_type, config.num_hidden_layers, config.num_attention_heads
    dim, none = config.hidden_size // heads, RotaryTable(torch.empty(0))
    scaled = kind == "opt" or (kind != "gpt_neo" and config.scale_attn_weights)
    kv = 1 if kind == "gpt_bigcode" and config.multi_query else heads
    factors = [dim**-0.5 if scaled else 1.0] * count
    windows: list[int | None] = [None] * count
    if kind == "gpt2" and config.scale_attn_by_inverse_layer_idx:
        factors = [factor / number for number, factor in enumerate(factors, 1)]
    if kind == "gpt_neo":
        windows = [config.window_size if a == "local" else None for a in config.attention_layers]
    return [
        LayerKind(AttentionHeads(heads, kv, dim, factor), none, window, positioned=False)
        for factor, window in zip(factors, windows, strict=True)
    ]
