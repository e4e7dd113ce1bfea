"""Llama and its relatives: SmolLM2, Mistral and Ministral, Qwen2 (q/k/v biases), Qwen3 (q/k norms),
SmolLM3 (some layers do not turn queries and keys), Granite (multipliers), Phi-3 and Phi-4-mini
(q/k/v and gate/up stored as one, heads turned in part).

The config gives their differences. The truth is transformers' `modeling_{model_type}.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cetane.families.base import (
    Block,
    CacheGroup,
    Exchange,
    Flow,
    Memory,
    Model,
    Spaces,
    Truth,
    Weight,
)
from cetane.families.decoder import TURNS, DecoderConfig, decoder_model
from cetane.families.layers import MLP, AttentionHeads, Held, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Mask

Options = ResidualOptions
MODEL_TYPES = (
    "granite", "llama", "ministral", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Phi-3's tensors, and the projections that their rows are."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class LlamaConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    """Only Llama, Qwen3, SmolLM3 and Granite have it."""
    mlp_bias: bool
    """Only Llama, SmolLM3 and Granite have it."""
    sliding_window: int | None
    """Only Mistral, Ministral, Phi-3, Qwen and SmolLM3 have it."""
    layer_types: list[str]
    """Only Ministral, Qwen and SmolLM3 have it."""
    no_rope_layers: list[int]
    """Only SmolLM3 has it: 0 for a layer that does not turn queries and keys."""
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Only Granite has the last four."""


@dataclass(frozen=True)
class Traits:
    """What differs between the relatives, but for windows and rotary tables."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: Literal["none", "head", "whole"] = "none"
    """Whether queries and keys are normed: each attention head, or all together."""
    clip: float | None = None
    """The bound of queries, keys and values, after their norms."""
    fused: bool = False
    """Whether one tensor stores q, k and v, and one gate and up."""
    scores: float | None = None
    """The factor on scores; None for one over the root of a head's width."""
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    """Factors on the embedding, on what attention and MLP add, and on logits."""


def traits(config: LlamaConfig) -> Traits:
    """The traits of a config."""
    match config.model_type:
        case "llama" | "smollm3":
            own = config.attention_bias
            return Traits(qkv_bias=own, out_bias=own, mlp_bias=config.mlp_bias)
        case "qwen2":
            return Traits(qkv_bias=True)
        case "qwen3":
            own = config.attention_bias
            return Traits(qkv_bias=own, out_bias=own, norms="head")
        case "phi3":
            return Traits(fused=True)
        case "granite":
            own = config.attention_bias
            return Traits(
                qkv_bias=own, out_bias=own, mlp_bias=config.mlp_bias,
                scores=config.attention_multiplier, embedding=config.embedding_multiplier,
                residual=config.residual_multiplier, logits=1 / config.logits_scaling,
            )  # fmt: skip
    return Traits()


class LlamaAttention(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        own: Traits,
        heads: AttentionHeads,
        factor: float = 1.0,
        inverse: float = 1.0,
    ) -> None:
        """`factor` multiplies its output. Its input is `inverse` times the model's."""
        super().__init__()
        self.heads = heads
        hidden, inner = config.hidden_size, heads.query * heads.dim
        shared, bias = heads.kv * heads.dim, own.qkv_bias
        self.q_proj = Projection(hidden, inner, "attention", bias, inverse=inverse)
        self.k_proj = Projection(hidden, shared, "attention", bias, inverse=inverse)
        self.v_proj = Projection(hidden, shared, "attention", bias, inverse=inverse)
        self.o_proj = Projection(inner, hidden, "attention", own.out_bias, factor)
        self.clip, self.whole = own.clip, own.norms == "whole"
        for name, count in (("q_norm", heads.query), ("k_norm", heads.kv)):
            size, axis = (count * heads.dim, 1) if self.whole else (heads.dim, 2)
            normed = own.norms != "none"
            norm = RMSNorm(size, config.rms_norm_eps, axis) if normed else nn.Identity()
            self.add_module(name, norm)

    def project(self, x: Tensor, letter: str, count: int) -> Tensor:
        """Queries, keys or values `(1, count, D, T)`."""
        norm: Callable[[Tensor], Tensor] = getattr(self, f"{letter}_norm", nn.Identity())
        made = self.get_submodule(f"{letter}_proj")(x)
        made = norm(made) if self.whole else made
        if self.clip is not None:
            made = made.clamp(-self.clip, self.clip)
        made = self.heads.split(made, count)
        return made if self.whole else norm(made)

    def forward(
        self, x: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor, extend: Callable[..., Any]
    ) -> Tensor:
        """`turn` gives queries and keys their positions."""
        heads = self.heads
        q, k = self.project(x, "q", heads.query), self.project(x, "k", heads.kv)
        v = self.project(x, "v", heads.kv)
        keys, values = extend(turn(k), v)
        return self.o_proj(heads.merge(self.mixed(turn(q), keys, values, mask)))

    def mixed(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """What queries make of all values `(1, H, D, T)`."""
        return attend(q, keys, values, mask, self.heads)


@dataclass(frozen=True)
class Place:
    """A layer's number, and what the host tells its attention."""

    index: int
    heads: AttentionHeads
    mask: str
    rotated: int
    """The channels of an attention head that turn; 0 for none."""
    scale: float
    """The factor from the model's residual stream to the port's."""


class LlamaAttentionBlock(Block):
    """Attention, normed before. The residual stream is `scale` times the model's."""

    keeps = ("kv",)
    kind = "attn"

    def __init__(self, config: LlamaConfig, own: Traits, place: Place) -> None:
        index = place.index
        super().__init__(f"{self.kind}-{index:02}", index, f"model.layers.{index}.")
        self.mask, self.rotated, self.own = place.mask, place.rotated, own
        self.reads = ("hidden", *(("rope_cos", "rope_sin") if place.rotated else ()), place.mask)
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, place.scale)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, own, place.heads, place.scale * own.residual)

    def truths(self) -> dict[str, Truth]:
        return {}  # no module of transformers gives the sum after attention

    def exchanges(self) -> tuple[Exchange, ...]:
        heads = self.self_attn.heads
        shared = heads.kv, heads.query // heads.kv, heads.dim
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        values = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
        through = Exchange(("self_attn.o_proj",), values, shared)
        return (
            *((through,) if self.own.clip is None else ()),
            Exchange(qkv, ("input_layernorm.weight",)),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        x = self.input_layernorm(h)
        turn: Callable[[Tensor], Tensor] = nn.Identity()
        if self.rotated:
            cos, sin = flow["rope_cos"], flow["rope_sin"]
            turn = partial(rotate, cos=cos, sin=sin, dim=self.rotated)
        flow["hidden"] = h + self.self_attn(x, turn, flow[self.mask], memory["kv"])


class LlamaLayer(LlamaAttentionBlock):
    """Attention and MLP, each normed before."""

    kind = "layer"

    def __init__(self, config: LlamaConfig, own: Traits, place: Place) -> None:
        super().__init__(config, own, place)
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, place.scale)
        added = place.scale * own.residual
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, own.mlp_bias, added)

    def truths(self) -> dict[str, Truth]:
        return Block.truths(self)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        module, _, name = path.removesuffix(".weight").rpartition(".")
        whole = next((w for w in FUSED if self.own.fused and name in FUSED[w]), None)
        if whole is None:
            return plain
        parts = {part: self.get_submodule(f"{module}.{part}") for part in FUSED[whole]}
        sizes = {part: int(made.outputs) for part, made in parts.items()}  # type: ignore[arg-type]
        start = sum(sizes[part] for part in FUSED[whole][: FUSED[whole].index(name)])
        return replace(
            plain,
            name=f"{self.prefix}{module}.{whole}.weight",
            stored=(sum(sizes.values()), *held.stored[1:]),
            rows=(start, start + sizes[name]),
        )

    def exchanges(self) -> tuple[Exchange, ...]:
        return (
            *super().exchanges(),
            Exchange(("mlp.down_proj",), ("mlp.up_proj.weight", "mlp.up_proj.bias")),
            Exchange(("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm.weight",)),
        )

    def spaces(self) -> Spaces:
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return Spaces(
            ("self_attn.o_proj", "mlp.down_proj"),
            {"input_layernorm": qkv, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
            ("self_attn.v_proj", "self_attn.o_proj", self.self_attn.heads.dim),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        super().forward(flow, memory)
        h = flow["hidden"]
        flow["hidden"] = h + self.mlp(self.post_attention_layernorm(h))


def author(config: LlamaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own, windows = traits(config), layer_windows(config)
    return decoder(
        config, own, options.scale, windows, lambda place: (LlamaLayer(config, own, place),)
    )


def decoder(
    config: LlamaConfig,
    own: Traits,
    scale: float,
    windows: Sequence[int | None],
    layer: Callable[[Place], tuple[Block, ...]],
    channels: Mapping[str, int] = {},
) -> Model:
    """The model whose layers are the blocks that `layer` makes for each place; `channels` are of
    the tensors between them."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factor = dim**-0.5 if own.scores is None else own.scores
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, factor)
    masks = {window: "mask" if window is None else "mask_window" for window in windows}
    part = config.rope_parameters.get("partial_rotary_factor") if own.fused else None
    rotary = rotary_table(config, dim, part=part)
    turning = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    with torch.device("meta"):
        layers = [
            layer(Place(index, heads, masks[window], rotary.width * bool(turns), scale))
            for index, (window, turns) in enumerate(zip(windows, turning, strict=True))
        ]
    return decoder_model(
        config,
        [block for blocks in layers for block in blocks],
        scale,
        host=TURNS | {name: Mask(group="kv", window=window) for window, name in masks.items()},
        memory={"kv": CacheGroup(heads.query, heads.kv, dim)},
        rotary={"default": rotary},
        channels=channels,
        embedding=own.embedding,
        logits=own.logits,
    )


def layer_windows(config: LlamaConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None for full attention."""
    if config.model_type in ("llama", "granite"):
        return [None] * config.num_hidden_layers
    if config.model_type in ("ministral3", "mistral", "phi3"):
        return [config.sliding_window] * config.num_hidden_layers
    kinds = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
