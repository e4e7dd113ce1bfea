"""Llama and its relatives: SmolLM2, Mistral, Qwen2 (q/k/v biases), Qwen3 (q/k norms).

The config gives their differences. The truth is transformers' `modeling_{model_type}.py`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cetane.families.base import (
    Block,
    CacheGroup,
    Exchange,
    Flow,
    Memory,
    Model,
    StoredTable,
)
from cetane.families.layers import MLP, AttentionHeads, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Embedding, Mask, Rotary, Source

Options = ResidualOptions
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

__all__ = ["MODEL_TYPES", "Options", "author"]


class LlamaConfig(Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    attention_bias: bool
    """Only Llama and Qwen3 have it."""
    mlp_bias: bool
    """Only Llama has it."""
    sliding_window: int | None
    """Only Mistral and Qwen have it."""
    layer_types: list[str]
    """Only Qwen has it."""


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, heads: AttentionHeads, factor: float) -> None:
        """`factor` multiplies its output."""
        super().__init__()
        self.heads = heads
        hidden, inner = config.hidden_size, heads.query * heads.dim
        out_bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        qkv_bias = config.model_type == "qwen2" or out_bias
        self.q_proj = Projection(hidden, inner, "attention", qkv_bias)
        self.k_proj = Projection(hidden, heads.kv * heads.dim, "attention", qkv_bias)
        self.v_proj = Projection(hidden, heads.kv * heads.dim, "attention", qkv_bias)
        self.o_proj = Projection(inner, hidden, "attention", out_bias, factor)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(heads.dim, config.rms_norm_eps, axis=2) if normed else nn.Identity()
        self.k_norm = RMSNorm(heads.dim, config.rms_norm_eps, axis=2) if normed else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, extend: Callable[..., Any]
    ) -> Tensor:
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = extend(rotate(k, cos, sin, heads.dim), v)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed))


class LlamaLayer(Block):
    """Attention and MLP, each normed before. The residual stream is `scale` times the model's."""

    keeps = ("kv",)

    def __init__(
        self, config: LlamaConfig, heads: AttentionHeads, index: int, mask: str, scale: float
    ) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.reads = ("hidden", "rope_cos", "rope_sin", mask)
        self.mask = mask
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, scale)
        bias = config.model_type == "llama" and config.mlp_bias
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, heads, scale)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, bias, scale)

    def exchanges(self) -> tuple[Exchange, ...]:
        heads = self.self_attn.heads
        shared = heads.kv, heads.query // heads.kv, heads.dim
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        values = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
        return (
            Exchange(("self_attn.o_proj",), values, shared),
            Exchange(("mlp.down_proj",), ("mlp.up_proj.weight", "mlp.up_proj.bias")),
            Exchange(qkv, ("input_layernorm.weight",)),
            Exchange(("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm.weight",)),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        x = self.input_layernorm(h)
        rotary = flow["rope_cos"], flow["rope_sin"]
        h = h + self.self_attn(x, *rotary, flow[self.mask], memory["kv"])
        flow["hidden"] = h + self.mlp(self.post_attention_layernorm(h))


def author(config: LlamaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5)
    windows, scale = layer_windows(config), options.scale
    masks = {window: "mask" if window is None else "mask_window" for window in windows}
    with torch.device("meta"):
        layers = tuple(
            LlamaLayer(config, heads, index, masks[window], scale)
            for index, window in enumerate(windows)
        )
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    host: dict[str, Source] = {
        "hidden": Embedding(),
        "rope_cos": Rotary(table="default", part="cos"),
        "rope_sin": Rotary(table="default", part="sin"),
    }
    host |= {name: Mask(group="kv", window=window) for window, name in masks.items()}
    return Model(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.rms_norm_eps, scale),
        layers=layers,
        embedding=StoredTable(table, factor=scale),
        norm=norm,
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host=host,
        memory={"kv": CacheGroup(heads.query, heads.kv, dim)},
        rotary={"default": rotary_table(config, dim)},
        max_context=config.max_position_embeddings,
        channels={"hidden": config.hidden_size},
        residual_scale=scale,
    )


def layer_windows(config: LlamaConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None for full attention."""
    if config.model_type in ("llama", "mistral"):
        window = config.sliding_window if config.model_type == "mistral" else None
        return [window] * config.num_hidden_layers
    kinds = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
