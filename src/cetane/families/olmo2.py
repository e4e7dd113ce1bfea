"""OLMo 2, and OLMo 3 with its sliding layers: norms after attention and MLP. Queries and keys are
normed over all heads together.

The truth is transformers' `modeling_olmo2.py` and `modeling_olmo3.py`.
"""

from functools import partial
from typing import Protocol

import torch

from cetane.families.base import Block, Exchange, Flow, Memory, Model, Spaces
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.kinds import KINDS, LayerKind
from cetane.families.layers import MLP, AttentionHeads, RMSNorm, rotate
from cetane.families.llama import LlamaAttention, Traits
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table

Options = ResidualOptions
MODEL_TYPES = ("olmo2", "olmo3")

__all__ = ["MODEL_TYPES", "Options", "author"]


class OlmoConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`; OLMo 3 has a table of rotary
    parameters for each type of layer."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    sliding_window: int
    layer_types: list[str]
    """Only OLMo 3 has the last two."""


class OlmoLayer(Block):
    """Attention and MLP, each normed after. The residual stream is `scale` times the model's: what
    reads it undoes the factor, and the gains of the norms include it."""

    def __init__(self, config: OlmoConfig, index: int, kind: LayerKind, scale: float) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        size, eps = config.hidden_size, config.rms_norm_eps
        bias = config.attention_bias
        own = Traits(qkv_bias=bias, out_bias=bias, norms="whole")
        self.self_attn = LlamaAttention(config, own, kind.heads, inverse=scale)
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
        h, cos, sin, mask = (flow[name] for name in self.reads)
        turn = partial(rotate, cos=cos, sin=sin, dim=self.self_attn.heads.dim)
        mixed = self.self_attn(h, turn, mask, memory[self.keeps[0]])
        h = h + self.post_attention_layernorm(mixed)
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
    return decoder_model(
        config,
        layers,
        scale,
        host={name: source for kind in kinds.values() for name, source in kind.host().items()},
        memory={kind.name: kind.group() for kind in kinds.values()},
        rotary={kind.name: kind.rotary for kind in kinds.values()},
    )
