"""LFM2: short convolutions with gates, and attention with normed queries and keys in some layers.

A convolution keeps the last columns of its gated input: a history. The truth is transformers'
`modeling_lfm2.py`.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cetane.families.base import (
    Block,
    CacheGroup,
    Exchange,
    Flow,
    History,
    Memory,
    Model,
    Spaces,
    StoredTable,
)
from cetane.families.layers import AttentionHeads, CausalTaps, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Embedding, Mask, Rotary, Source

Options = ResidualOptions
MODEL_TYPES = ("lfm2",)

__all__ = ["MODEL_TYPES", "Options", "author"]


class Lfm2Config(Protocol):
    """The keys that are read from an Lfm2Config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    layer_types: list[str]
    conv_bias: bool
    conv_L_cache: int
    block_auto_adjust_ff_dim: bool
    block_ffn_dim_multiplier: float | None
    block_multiple_of: int


def inner_channels(config: Lfm2Config) -> int:
    """The channels inside the MLP."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = 2 * inner // 3
        if config.block_ffn_dim_multiplier is not None:
            unit = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // unit) * unit
    return inner


class ShortConvolution(nn.Module):
    """`out(c * conv(b * x))`, where `in_proj` makes b, c and x. `factor` multiplies its output."""

    def __init__(self, config: Lfm2Config, factor: float) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.conv_bias
        self.size = size
        self.in_proj = Projection(size, 3 * size, "attention", bias)
        self.conv = CausalTaps(size, config.conv_L_cache, bias)
        self.out_proj = Projection(size, size, "attention", bias, factor)

    def forward(self, x: Tensor, past: Any) -> Tensor:
        """`past` puts the columns before `x` in front of it, and keeps the last ones."""
        b, c, x = self.in_proj(x).split(self.size, dim=1)
        return self.out_proj(c * self.conv(past(b * x)))


class Lfm2Attention(nn.Module):
    """`factor` multiplies its output."""

    def __init__(self, config: Lfm2Config, heads: AttentionHeads, factor: float) -> None:
        super().__init__()
        self.heads = heads
        size, inner, shared = config.hidden_size, heads.query * heads.dim, heads.kv * heads.dim
        self.q_proj = Projection(size, inner, "attention")
        self.k_proj = Projection(size, shared, "attention")
        self.v_proj = Projection(size, shared, "attention")
        self.out_proj = Projection(inner, size, "attention", factor=factor)
        self.q_layernorm = RMSNorm(heads.dim, config.norm_eps, axis=2)
        self.k_layernorm = RMSNorm(heads.dim, config.norm_eps, axis=2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, extend: Any) -> Tensor:
        heads = self.heads
        q = self.q_layernorm(heads.split(self.q_proj(x), heads.query))
        k = self.k_layernorm(heads.split(self.k_proj(x), heads.kv))
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = extend(rotate(k, cos, sin, heads.dim), v)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.out_proj(heads.merge(mixed))


class FeedForward(nn.Module):
    """`w2(silu(w1(x)) * w3(x))`, times `factor`."""

    def __init__(self, config: Lfm2Config, factor: float) -> None:
        super().__init__()
        size, inner = config.hidden_size, inner_channels(config)
        self.w1 = Projection(size, inner, "mlp")
        self.w3 = Projection(size, inner, "mlp")
        self.w2 = Projection(inner, size, "mlp", factor=factor)
        self.act = nn.functional.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Lfm2Layer(Block):
    """A short convolution or attention, then an MLP, each normed before. The residual stream is
    `scale` times the model's."""

    def __init__(self, config: Lfm2Config, heads: AttentionHeads, index: int, scale: float) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.attends = config.layer_types[index] == "full_attention"
        size, eps = config.hidden_size, residual_eps(config.norm_eps, scale)
        self.operator_norm = RMSNorm(size, eps)
        if self.attends:
            self.reads, self.keeps = ("hidden", "rope_cos", "rope_sin", "mask"), ("kv",)
            self.self_attn = Lfm2Attention(config, heads, scale)
        else:
            self.reads, self.keeps = ("hidden",), ("conv",)
            self.conv = ShortConvolution(config, scale)
        self.ffn_norm = RMSNorm(size, eps)
        self.feed_forward = FeedForward(config, scale)

    def exchanges(self) -> tuple[Exchange, ...]:
        return (
            Exchange(("feed_forward.w2",), ("feed_forward.w3.weight",)),
            Exchange(("feed_forward.w1", "feed_forward.w3"), ("ffn_norm.weight",)),
        )

    def spaces(self) -> Spaces:
        if self.attends:
            first: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            writer, width = "self_attn.out_proj", self.self_attn.heads.dim
            values = ("self_attn.v_proj", writer, width)
        else:
            first, writer, values = ("conv.in_proj",), "conv.out_proj", None
        return Spaces(
            (writer, "feed_forward.w2"),
            {"operator_norm": first, "ffn_norm": ("feed_forward.w1", "feed_forward.w3")},
            values,
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        h, *host = (flow[name] for name in self.reads)
        x, (kept,) = self.operator_norm(h), (memory[name] for name in self.keeps)
        h = h + (self.self_attn(x, *host, kept) if self.attends else self.conv(x, kept))
        flow["hidden"] = h + self.feed_forward(self.ffn_norm(h))


def author(config: Lfm2Config, options: ResidualOptions) -> Model:
    """The model of an Lfm2Config."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5)
    scale, table = options.scale, "model.embed_tokens.weight"
    memory: dict[str, CacheGroup | History] = {}
    host: dict[str, Source] = {"hidden": Embedding()}
    if "full_attention" in config.layer_types:
        memory["kv"] = CacheGroup(heads.query, heads.kv, dim)
        host["rope_cos"] = Rotary(table="default", part="cos")
        host["rope_sin"] = Rotary(table="default", part="sin")
        host["mask"] = Mask(group="kv")
    if "conv" in config.layer_types:
        memory["conv"] = History(config.hidden_size, config.conv_L_cache - 1)
    with torch.device("meta"):
        layers = tuple(
            Lfm2Layer(config, heads, index, scale) for index in range(len(config.layer_types))
        )
    return Model(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.norm_eps, scale),
        layers=layers,
        embedding=StoredTable(table, factor=scale),
        norm="model.embedding_norm.weight",
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host=host,
        memory=memory,
        rotary={"default": rotary_table(config, dim)},
        max_context=config.max_position_embeddings,
        channels={"hidden": config.hidden_size},
        residual_scale=scale,
    )
