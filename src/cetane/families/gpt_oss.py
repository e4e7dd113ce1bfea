"""gpt-oss: layers slide and see all in turn, scores have a sink for each head, and a few of many
gated experts with biases and bounds answer for a token.

The truth is transformers' `modeling_gpt_oss.py`.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.base import Block, Flow, Memory, Model, Truth, Weight
from cetane.families.decoder import DecoderConfig, decoder_model
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    MixtureExperts,
    StackedRows,
    expert_channels,
)
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import (
    AttentionHeads,
    Held,
    Leaf,
    Projection,
    RMSNorm,
    attend,
    rotate,
)
from cetane.families.llama import LlamaAttention, Traits
from cetane.families.options import residual_eps
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("gpt_oss",)

__all__ = ["MODEL_TYPES", "Options", "author"]


class GptOssConfig(DecoderConfig, Protocol):
    """The keys that are read from a GptOssConfig."""

    head_dim: int
    attention_bias: bool
    sliding_window: int
    layer_types: list[str]
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float


class Sinks(Leaf):
    """A score for each query head, `(1, KV, G, 1)`."""

    weight: Tensor

    def __init__(self, heads: AttentionHeads) -> None:
        super().__init__()
        self.hold("weight", (1, heads.kv, heads.query // heads.kv, 1), (heads.query,))


class SinkAttention(LlamaAttention):
    """Llama's attention with sinks. `factor` multiplies its output."""

    def __init__(self, config: GptOssConfig, heads: AttentionHeads, factor: float) -> None:
        own = Traits(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        super().__init__(config, own, heads, factor)
        self.sinks = Sinks(heads)

    def mixed(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return attend(q, keys, values, mask, self.heads, self.sinks.weight)


class SinkAttentionBlock(Block):
    """Attention, normed before. The residual stream is `scale` times the model's."""

    def __init__(self, config: GptOssConfig, index: int, kind: LayerKind, scale: float) -> None:
        super().__init__(f"attn-{index:02}", index, f"model.layers.{index}.")
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        eps = residual_eps(config.rms_norm_eps, scale)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.self_attn = SinkAttention(config, kind.heads, scale)

    def truths(self) -> dict[str, Truth]:
        return {}  # no module of transformers gives the sum after attention

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("sinks.weight", "sinks"), shape, held)

    def forward(self, flow: Flow, memory: Memory) -> None:
        h, cos, sin, mask = (flow[name] for name in self.reads)
        turn = partial(rotate, cos=cos, sin=sin, dim=self.self_attn.heads.dim)
        x = self.input_layernorm(h)
        flow["hidden"] = h + self.self_attn(x, turn, mask, memory[self.keeps[0]])


class GptOssExperts(MixtureExperts):
    """Experts with biases: `(up + 1) * gate * sigmoid(alpha * gate)`, of bounded gates and ups.

    transformers keeps their matrices transposed, with gates and ups in turn.
    """

    def __init__(self, alpha: float, limit: float, mixture: Mixture, start: int, stop: int) -> None:
        super().__init__(mixture, start, stop, bias=True)
        self.alpha, self.limit = alpha, limit
        count = stop - start
        self.down_proj_bias = Projection(count, mixture.hidden, None, factor=mixture.factor)
        hidden, inner = mixture.hidden, mixture.inner
        self.stored = {
            "down_proj.weight": StackedRows("down_proj", (inner, hidden), columns_of),
            "down_proj_bias.weight": StackedRows("down_proj_bias", (hidden,), torch.t),
        }
        for turn, name in enumerate(("gate_proj", "up_proj")):
            every_second = partial(in_turn, turn)
            whole = (hidden, 2 * inner)
            self.stored[f"{name}.weight"] = StackedRows("gate_up_proj", whole, every_second)
            self.stored[f"{name}.bias"] = StackedRows(
                "gate_up_proj_bias", (2 * inner,), every_second
            )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        biases = self.down_proj_bias(weights[:, self.start : self.stop])
        return self.down_proj(self.weighted(inner, weights)) + biases


def in_turn(turn: int, stored: Tensor) -> Tensor:
    """Every second column of each expert, as rows `(experts * I, H)`; of a bias, as a vector."""
    mine = stored[..., turn::2]
    return mine.transpose(1, 2).flatten(0, 1) if mine.ndim == 3 else mine.flatten()


def columns_of(stored: Tensor) -> Tensor:
    """The rows of all experts as columns, `(H, experts * I)`."""
    return stored.flatten(0, 1).T


def author(config: GptOssConfig, options: ExpertOptions) -> Model:
    """The model of a GptOssConfig."""
    scale, dim, size = options.scale, config.head_dim, config.hidden_size
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5)
    rotary = rotary_table(config, dim)
    names = kind_names(config.layer_types)
    windows = {"sliding": config.sliding_window, "full": None}
    kinds = {
        name: LayerKind(name=name, heads=heads, window=windows[name], rotary=rotary)
        for name in dict.fromkeys(names)
    }
    mixture = Mixture(
        hidden=size,
        inner=config.intermediate_size,
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        normalised=True,
        act="silu",
        together=options.together,
        factor=scale,
    )
    group = partial(GptOssExperts, config.swiglu_alpha, config.swiglu_limit)
    eps = residual_eps(config.rms_norm_eps, scale)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, name in enumerate(names):
            layers.append(SinkAttentionBlock(config, index, kinds[name], scale))
            layers.append(MixtureBlock(mixture, index, eps, "router", True, group))
    return decoder_model(
        config,
        layers,
        scale,
        host={name: source for kind in kinds.values() for name, source in kind.host().items()},
        memory={kind.name: kind.group() for kind in kinds.values()},
        rotary={kind.name: kind.rotary for kind in kinds.values()},
        channels=expert_channels(mixture),
    )
