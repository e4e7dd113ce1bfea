"""Llama and its relatives: SmolLM2, Mistral, Qwen2 (q/k/v biases), Qwen3 (q/k norms), SmolLM3 (some
layers do not turn queries and keys), Granite (multipliers), Phi-3 and Phi-4-mini (q/k/v and gate/up
stored as one, heads turned in part).

The config gives their differences. The truth is transformers' `modeling_{model_type}.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
    Spaces,
    StoredTable,
    Weight,
)
from cetane.families.layers import MLP, AttentionHeads, Held, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import longest, rotary_table
from cetane.schema.interface import Embedding, Mask, Rotary, Source

Options = ResidualOptions
MODEL_TYPES = ("granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Phi-3's tensors, and the projections that their rows are."""

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
    """Only Llama, Qwen3, SmolLM3 and Granite have it."""
    mlp_bias: bool
    """Only Llama, SmolLM3 and Granite have it."""
    sliding_window: int | None
    """Only Mistral, Phi-3, Qwen and SmolLM3 have it."""
    layer_types: list[str]
    """Only Qwen and SmolLM3 have it."""
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
    head_norms: bool = False
    """Whether queries and keys are normed."""
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
            return Traits(qkv_bias=own, out_bias=own, head_norms=True)
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
        self, config: LlamaConfig, own: Traits, heads: AttentionHeads, factor: float
    ) -> None:
        """`factor` multiplies its output."""
        super().__init__()
        self.heads = heads
        hidden, inner = config.hidden_size, heads.query * heads.dim
        self.q_proj = Projection(hidden, inner, "attention", own.qkv_bias)
        self.k_proj = Projection(hidden, heads.kv * heads.dim, "attention", own.qkv_bias)
        self.v_proj = Projection(hidden, heads.kv * heads.dim, "attention", own.qkv_bias)
        self.o_proj = Projection(inner, hidden, "attention", own.out_bias, factor)
        eps, normed = config.rms_norm_eps, own.head_norms
        self.q_norm = RMSNorm(heads.dim, eps, axis=2) if normed else nn.Identity()
        self.k_norm = RMSNorm(heads.dim, eps, axis=2) if normed else nn.Identity()

    def forward(
        self, x: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor, extend: Callable[..., Any]
    ) -> Tensor:
        """`turn` gives queries and keys their positions."""
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = extend(turn(k), v)
        return self.o_proj(heads.merge(attend(turn(q), keys, values, mask, heads)))


class LlamaLayer(Block):
    """Attention and MLP, each normed before. The residual stream is `scale` times the model's."""

    keeps = ("kv",)

    def __init__(
        self,
        config: LlamaConfig,
        own: Traits,
        heads: AttentionHeads,
        index: int,
        mask: str,
        rotated: int,
        scale: float,
    ) -> None:
        """`rotated` channels of a head turn; 0 for none."""
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        rotary = ("rope_cos", "rope_sin") if rotated else ()
        self.reads = ("hidden", *rotary, mask)
        self.mask, self.rotated, self.fused = mask, rotated, own.fused
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, scale)
        added = scale * own.residual
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = LlamaAttention(config, own, heads, added)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, own.mlp_bias, added)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        module, _, name = path.removesuffix(".weight").rpartition(".")
        whole = next((w for w in FUSED if self.fused and name in FUSED[w]), None)
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

    def spaces(self) -> Spaces:
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return Spaces(
            ("self_attn.o_proj", "mlp.down_proj"),
            {"input_layernorm": qkv, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
            ("self_attn.v_proj", "self_attn.o_proj", self.self_attn.heads.dim),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        x = self.input_layernorm(h)
        turn: Callable[[Tensor], Tensor] = nn.Identity()
        if self.rotated:
            cos, sin = flow["rope_cos"], flow["rope_sin"]
            turn = partial(rotate, cos=cos, sin=sin, dim=self.rotated)
        h = h + self.self_attn(x, turn, flow[self.mask], memory["kv"])
        flow["hidden"] = h + self.mlp(self.post_attention_layernorm(h))


def author(config: LlamaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    own = traits(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factor = dim**-0.5 if own.scores is None else own.scores
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, factor)
    windows, scale = layer_windows(config), options.scale
    masks = {window: "mask" if window is None else "mask_window" for window in windows}
    part = config.rope_parameters.get("partial_rotary_factor") if own.fused else None
    rotary = rotary_table(config, dim, part=part)
    turning = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    with torch.device("meta"):
        layers = tuple(
            LlamaLayer(config, own, heads, index, masks[window], rotary.width * bool(turns), scale)
            for index, (window, turns) in enumerate(zip(windows, turning, strict=True))
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
        embedding=StoredTable(table, factor=scale * own.embedding),
        norm=norm,
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host=host,
        memory={"kv": CacheGroup(heads.query, heads.kv, dim)},
        rotary={"default": rotary},
        max_context=longest(config, config.max_position_embeddings),
        channels={"hidden": config.hidden_size},
        logit_factor=own.logits,
        residual_scale=scale,
    )


def layer_windows(config: LlamaConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None for full attention."""
    if config.model_type in ("llama", "granite"):
        return [None] * config.num_hidden_layers
    if config.model_type in ("mistral", "phi3"):
        return [config.sliding_window] * config.num_hidden_layers
    kinds = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
