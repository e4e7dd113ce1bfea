"""OLMo 2, and OLMo 3 with its sliding layers: norms after attention and MLP. Queries and keys are
normed over all heads together.

The truth is transformers' `modeling_olmo2.py` and `modeling_olmo3.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm, only_values
from cetane.families.base import Block, Flow, Memory, Spaces
from cetane.families.blocks import within
from cetane.families.decoder import DecoderConfig, decoder_model, heads_of
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import MLP, Exchange, RMSNorm
from cetane.families.model import Model
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
    sliding_window: int | None
    layer_types: list[str]
    """Only OLMo 3 has the last two."""


class OlmoLayer(Block):
    """Attention and MLP, each normed after. The residual stream is `scale` times the model's: what
    reads it undoes the factor, and the gains of the norms include it."""

    def __init__(self, config: OlmoConfig, index: int, kind: LayerKind, scale: float) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        size, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        form = AttentionForm(qkv_bias=bias, out_bias=bias, norms="whole")
        self.self_attn = Attention(size, eps, kind, form, inverse=scale)
        self.post_attention_layernorm = RMSNorm(size, eps, factor=scale)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, inverse=scale)
        self.post_feedforward_layernorm = RMSNorm(size, eps, factor=scale)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Nothing stands before what reads the residual stream."""
        own = [within("self_attn", one) for one in self.self_attn.exchanges()]
        return (*own, *(within("mlp", one) for one in self.mlp.exchanges()))

    def spaces(self) -> Spaces:
        return only_values(self.self_attn)

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        h = h + self.post_attention_layernorm(self.self_attn(h, flow, memory))
        flow["hidden"] = h + self.post_feedforward_layernorm(self.mlp(h))


def author(config: OlmoConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    heads, typed = heads_of(config), config.model_type == "olmo3"
    names = kind_names(config) if typed else ["full"] * config.num_hidden_layers
    kinds = {
        name: LayerKind(
            heads,
            # transformers turns whole heads, whatever the parameters say of a part.
            rotary_table(config, heads.dim, f"{name}_attention" if typed else None, part=1.0),
            config.sliding_window if name == "sliding" else None,
            name=name,
            table=name,
        )
        for name in dict.fromkeys(names)
    }
    with torch.device("meta"):
        layers = [OlmoLayer(config, i, kinds[name], options.scale) for i, name in enumerate(names)]
    return decoder_model(config, layers, options.scale, kinds.values())
