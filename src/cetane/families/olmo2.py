"""OLMo 2, and OLMo 3 with its sliding layers: norms after attention and MLP. Queries and keys are
normed over all heads together.

The truth is transformers' `modeling_olmo2.py` and `modeling_olmo3.py`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cetane.families.base import Block, Exchange, Flow, Memory, Model, Spaces, StoredTable
from cetane.families.kinds import KINDS, LayerKind
from cetane.families.layers import MLP, AttentionHeads, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Embedding

Options = ResidualOptions
MODEL_TYPES = ("olmo2", "olmo3")

__all__ = ["MODEL_TYPES", "Options", "author"]


class OlmoConfig(Protocol):
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
    """OLMo 3 has a table of them for each type of layer."""
    attention_bias: bool
    sliding_window: int
    layer_types: list[str]
    """Only OLMo 3 has the last two."""


class OlmoAttention(nn.Module):
    """Attention whose input is `scale` times the model's."""

    def __init__(self, config: OlmoConfig, heads: AttentionHeads, scale: float) -> None:
        super().__init__()
        self.heads = heads
        hidden, bias = config.hidden_size, config.attention_bias
        inner, shared = heads.query * heads.dim, heads.kv * heads.dim
        self.q_proj = Projection(hidden, inner, "attention", bias, inverse=scale)
        self.k_proj = Projection(hidden, shared, "attention", bias, inverse=scale)
        self.v_proj = Projection(hidden, shared, "attention", bias, inverse=scale)
        self.o_proj = Projection(inner, hidden, "attention", bias)
        self.q_norm = RMSNorm(inner, config.rms_norm_eps)
        self.k_norm = RMSNorm(shared, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, extend: Callable[..., Any]
    ) -> Tensor:
        heads = self.heads
        q = heads.split(self.q_norm(self.q_proj(x)), heads.query)
        k = heads.split(self.k_norm(self.k_proj(x)), heads.kv)
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = extend(rotate(k, cos, sin, heads.dim), v)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed))


class OlmoLayer(Block):
    """Attention and MLP, each normed after. The residual stream is `scale` times the model's: what
    reads it undoes the factor, and the gains of the norms include it."""

    def __init__(self, config: OlmoConfig, index: int, kind: LayerKind, scale: float) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = OlmoAttention(config, kind.heads, scale)
        self.post_attention_layernorm = RMSNorm(size, eps, factor=scale)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, inverse=scale)
        self.post_feedforward_layernorm = RMSNorm(size, eps, factor=scale)

    def exchanges(self) -> tuple[Exchange, ...]:
        heads = self.self_attn.heads
        shared = heads.kv, heads.query // heads.kv, heads.dim
        values = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
        return (
            Exchange(("self_attn.o_proj",), values, shared),
            Exchange(("mlp.down_proj",), ("mlp.up_proj.weight", "mlp.up_proj.bias")),
        )

    def spaces(self) -> Spaces:
        """Norms make what is added to the residual stream: only values can be turned."""
        width = self.self_attn.heads.dim
        return Spaces(values=("self_attn.v_proj", "self_attn.o_proj", width))

    def forward(self, flow: Flow, memory: Memory) -> None:
        h, *host = (flow[name] for name in self.reads)
        h = h + self.post_attention_layernorm(self.self_attn(h, *host, memory[self.keeps[0]]))
        flow["hidden"] = h + self.post_feedforward_layernorm(self.mlp(h))


def author(config: OlmoConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5)
    scale, typed = options.scale, config.model_type == "olmo3"
    types = config.layer_types if typed else ["full_attention"] * config.num_hidden_layers
    kinds = {
        layer_type: LayerKind(
            name=KINDS[layer_type],
            heads=heads,
            window=config.sliding_window if layer_type == "sliding_attention" else None,
            rotary=rotary_table(config, dim, layer_type if typed else None),
        )
        for layer_type in dict.fromkeys(types)
    }
    with torch.device("meta"):
        layers = tuple(OlmoLayer(config, i, kinds[t], scale) for i, t in enumerate(types))
    table = "model.embed_tokens.weight"
    return Model(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.rms_norm_eps, scale),
        layers=layers,
        embedding=StoredTable(table, factor=scale),
        norm="model.norm.weight",
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host={"hidden": Embedding()} | {n: s for k in kinds.values() for n, s in k.host().items()},
        memory={kind.name: kind.group() for kind in kinds.values()},
        rotary={kind.name: kind.rotary for kind in kinds.values()},
        max_context=config.max_position_embeddings,
        channels={"hidden": config.hidden_size},
        residual_scale=scale,
    )
