"""Llama and its relatives: SmolLM2, Mistral, Qwen2 (q/k/v biases), Qwen3 (q/k norms).

The differences are read from the config; truth is transformers' `modeling_{model_type}.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cetane.families.base import Block, CacheGroup, EmbeddingTable, Flow, Memory, Model
from cetane.families.layers import Heads, Projection, RMSNorm, activation, attend, rotate
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Embedding, Mask, Order, Rotary, Source

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Attention(nn.Module):
    def __init__(self, config: Any, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        hidden, inner = config.hidden_size, heads.query * heads.dim
        out_bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        qkv_bias = config.model_type == "qwen2" or out_bias
        self.q_proj = Projection(hidden, inner, "attention", qkv_bias)
        self.k_proj = Projection(hidden, heads.kv * heads.dim, "attention", qkv_bias)
        self.v_proj = Projection(hidden, heads.kv * heads.dim, "attention", qkv_bias)
        self.o_proj = Projection(inner, hidden, "attention", out_bias)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(heads.dim, config.rms_norm_eps, axis=2) if normed else nn.Identity()
        self.k_norm = RMSNorm(heads.dim, config.rms_norm_eps, axis=2) if normed else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, extend: Any) -> Tensor:
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = extend(rotate(k, cos, sin, heads.dim), v)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.model_type == "llama" and config.mlp_bias
        self.gate_proj = Projection(hidden, inner, "mlp", bias)
        self.up_proj = Projection(hidden, inner, "mlp", bias)
        self.down_proj = Projection(inner, hidden, "mlp", bias)
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(Block):
    keeps = ("kv",)

    def __init__(self, config: Any, heads: Heads, index: int, mask: str) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.reads = ("hidden", "rope_cos", "rope_sin", mask)
        self.mask = mask
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, heads)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        x = self.input_layernorm(h)
        rotary = flow["rope_cos"], flow["rope_sin"]
        h = h + self.self_attn(x, *rotary, flow[self.mask], memory["kv"])
        flow["hidden"] = h + self.mlp(self.post_attention_layernorm(h))


def author(config: Any, order: Order) -> Model:
    """The model of a transformers config of one of `MODEL_TYPES`."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5, order)
    windows = layer_windows(config)
    masks = {window: "mask" if window is None else "mask_window" for window in windows}
    with torch.device("meta"):
        layers = tuple(
            Layer(config, heads, index, masks[window]) for index, window in enumerate(windows)
        )
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    host: dict[str, Source] = {
        "hidden": Embedding(),
        "rope_cos": Rotary(table="default", part="cos"),
        "rope_sin": Rotary(table="default", part="sin"),
    }
    host |= {name: Mask(group="kv", window=window) for window, name in masks.items()}
    return Model(
        order=order,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        layers=layers,
        embedding=EmbeddingTable(table),
        norm=norm,
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host=host,
        memory={"kv": CacheGroup(heads.query, heads.kv, dim)},
        rotary={"default": rotary_table(config, dim)},
        max_context=config.max_position_embeddings,
        channels={"hidden": config.hidden_size},
    )


def layer_windows(config: Any) -> list[int | None]:
    """The attention window of every layer in tokens, None for full attention."""
    if config.model_type in ("llama", "mistral"):
        window = config.sliding_window if config.model_type == "mistral" else None
        return [window] * config.num_hidden_layers
    kinds = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
