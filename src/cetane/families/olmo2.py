"""OLMo 2, and OLMo 3 with its sliding layers: norms after attention and MLP. Queries and keys are
normed over all heads together. And EXAONE 4, which norms each head; if some of its layers slide,
the others give queries and keys no positions.

The truth is transformers' `modeling_{model_type}.py`.
"""

from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Spaces, Truth
from cetane.families.blocks import values_within, within
from cetane.families.decoder import DecoderConfig, decoder_model, heads_of
from cetane.families.kinds import DEFAULT, LayerKind, kind_names
from cetane.families.layers import MLP, Exchange, RMSNorm
from cetane.families.model import Model
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table

Options = ResidualOptions
MODEL_TYPES = ("exaone4", "olmo2", "olmo3")

__all__ = ["MODEL_TYPES", "Options", "author"]


class OlmoConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`; OLMo 3 has a table of rotary
    parameters for each type of layer."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    """EXAONE 4 has none."""
    sliding_window: int | None
    layer_types: list[str]
    """OLMo 2 has not the last two."""


class OlmoLayer(Block):
    """Attention, and an MLP in a `dense` layer, each normed after. The residual stream is `scale`
    times the model's: what reads it undoes the factor, and the gains of the norms include it."""

    def __init__(
        self, config: OlmoConfig, index: int, kind: LayerKind, scale: float, dense: bool = True
    ) -> None:
        name = f"{'layer' if dense else 'attn'}-{index:02}"
        super().__init__(name, index, f"model.layers.{index}.")
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        size, eps = config.hidden_size, config.rms_norm_eps
        form = AttentionForm(norms="head")
        if config.model_type != "exaone4":
            bias = config.attention_bias
            form = AttentionForm(qkv_bias=bias, out_bias=bias, norms="whole")
        self.self_attn = Attention(size, eps, kind, form, inverse=scale)
        self.post_attention_layernorm = RMSNorm(size, eps, factor=scale)
        self.dense = dense
        if dense:
            self.mlp = MLP(size, config.intermediate_size, config.hidden_act, inverse=scale)
            self.post_feedforward_layernorm = RMSNorm(size, eps, factor=scale)

    def truths(self) -> dict[str, Truth]:
        """No module of transformers gives the sum after attention."""
        return super().truths() if self.dense else {}

    def exchanges(self) -> tuple[Exchange, ...]:
        """Nothing stands before what reads the residual stream."""
        own = [within("self_attn", one) for one in self.self_attn.exchanges()]
        mlp = self.mlp.exchanges() if self.dense else ()
        return (*own, *(within("mlp", one) for one in mlp))

    def spaces(self) -> Spaces:
        """Norms make what is added to the residual stream."""
        return Spaces(values=values_within("self_attn", self.self_attn))

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        h = h + self.post_attention_layernorm(self.self_attn(h, flow, memory))
        if self.dense:
            h = h + self.post_feedforward_layernorm(self.mlp(h))
        flow["hidden"] = h


def author(config: OlmoConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    heads, typed = heads_of(config), config.model_type == "olmo3"
    older, exaone = config.model_type == "olmo2", config.model_type == "exaone4"
    names = ["full"] * config.num_hidden_layers if older else kind_names(config)
    kinds = {
        name: LayerKind(
            heads,
            # transformers gives whole heads positions, whatever the parameters say of a part.
            rotary_table(config, heads.dim, f"{name}_attention" if typed else None, part=1.0),
            config.sliding_window if name == "sliding" else None,
            name=name,
            table=DEFAULT if exaone else name,
            positioned=name == "sliding" or not exaone or config.sliding_window is None,
        )
        for name in dict.fromkeys(names)
    }
    with torch.device("meta"):
        layers = [OlmoLayer(config, i, kinds[name], options.scale) for i, name in enumerate(names)]
    return decoder_model(config, layers, options.scale, kinds.values())
