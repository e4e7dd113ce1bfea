"""The common part of Gemma 2, 3 and 4: sliding and full layers.

Each of the two kinds has its own caches and masks, and from Gemma 3 on its own rotary base. Norms
stand before and after attention and MLP.
"""

from typing import Any, Protocol, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.base import Block, Flow, Memory, Spaces
from cetane.families.kinds import KINDS, LayerKind
from cetane.families.layers import MLP, AttentionHeads, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import RotaryConfig, rotary_table


class GemmaConfig(RotaryConfig, Protocol):
    """The keys that are read from the config of every Gemma."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: list[str]
    sliding_window: int
    use_bidirectional_attention: bool | str | None
    final_logit_softcapping: float | None


class GemmaOptions(ResidualOptions):
    """The `[family]` table of a recipe: limits on the layers with full attention."""

    full_window: int | None = Field(default=None, ge=1)
    """The number of last tokens that full layers see; their caches are as short ("WFA" in the
    published ports). None for all tokens."""
    sinks: int = Field(default=0, ge=0)
    """The number of first tokens that they see beside the window (arXiv 2309.17453)."""
    full_block: int | None = Field(default=None, ge=1)
    """The number of keys that they take at a time ("flash decoding"). None for all keys."""

    @model_validator(mode="after")
    def consistent(self) -> Self:
        if self.sinks and self.full_window is None:
            raise ValueError("sinks needs full_window: without it, layers see all tokens")
        return self


def layer_kinds(config: GemmaConfig) -> list[str]:
    """The kind of every layer. Raises CetaneError for an unknown kind."""
    where = f"config.json of a {config.model_type} model is not valid"
    for name in config.layer_types:
        if name not in KINDS:
            raise CetaneError(f"{where}: layer_types: {name!r}; known: {', '.join(KINDS)}")
    if "sliding_attention" in config.layer_types and not config.sliding_window:
        raise CetaneError(f"{where}: sliding_window = {config.sliding_window}")
    if config.use_bidirectional_attention in (True, "all"):
        raise CetaneError("use_bidirectional_attention: only causal models generate text")
    return [KINDS[name] for name in config.layer_types]


def make_kind(
    config: GemmaConfig,
    of: RotaryConfig,
    layer_type: str,
    heads: AttentionHeads,
    options: GemmaOptions,
) -> LayerKind:
    """A kind of layers; `of` is the config of one such layer."""
    typed = config.model_type != "gemma2"
    parameters = (config.rope_parameters or {}).get(layer_type)
    if isinstance(parameters, dict) and parameters.get("rope_type", "default") == "default":
        part = parameters.get("partial_rotary_factor", 1.0)
        if part != 1:  # transformers ignores it
            raise CetaneError(f"rope_parameters: partial_rotary_factor = {part} of {layer_type}")
    full = layer_type == "full_attention"
    return LayerKind(
        name=KINDS[layer_type],
        heads=heads,
        window=options.full_window if full else config.sliding_window,
        sinks=options.sinks if full else 0,
        rotary=rotary_table(of, heads.dim, layer_type if typed else None),
    )


class GemmaAttention(nn.Module):
    """Attention, from Gemma 3 on with normed queries and keys."""

    def __init__(
        self,
        hidden: int,
        heads: AttentionHeads,
        bias: bool,
        eps: float,
        unit: bool,
        normed: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = Projection(hidden, heads.query * heads.dim, "attention", bias)
        self.k_proj = Projection(hidden, heads.kv * heads.dim, "attention", bias)
        self.v_proj = Projection(hidden, heads.kv * heads.dim, "attention", bias)
        self.o_proj = Projection(heads.query * heads.dim, hidden, "attention", bias)
        if normed:
            self.q_norm: nn.Module = RMSNorm(heads.dim, eps, axis=2, unit_offset=unit)
            self.k_norm: nn.Module = RMSNorm(heads.dim, eps, axis=2, unit_offset=unit)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, kept: Any) -> Tensor:
        """`kept` is the layer's memory, which `keys_values` reads and extends."""
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        keys, values = self.keys_values(x, cos, sin, kept)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
        heads = self.heads
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        seen: tuple[Tensor, Tensor] = kept(
            rotate(k, cos, sin, heads.dim), self.values(heads.split(self.v_proj(x), heads.kv))
        )
        return seen

    def values(self, v: Tensor) -> Tensor:
        return v


class GemmaLayer(Block):
    """Attention and MLP, each normed before and after.

    The residual stream may be `scale` times the model's. The norms before undo the factor, and the
    gains of the norms after include it.
    """

    def __init__(
        self,
        config: GemmaConfig,
        index: int,
        kind: LayerKind,
        attention: GemmaAttention,
        inner: int,
        unit: bool,
        scale: float = 1.0,
    ) -> None:
        super().__init__(f"layer-{index:02}", index, f"model.layers.{index}.")
        self.kind = kind
        self.reads, self.keeps = ("hidden", *kind.reads), (kind.name,)
        size, eps = config.hidden_size, config.rms_norm_eps
        before = residual_eps(eps, scale)
        self.input_layernorm = RMSNorm(size, before, unit_offset=unit)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, unit_offset=unit, factor=scale)
        self.pre_feedforward_layernorm = RMSNorm(size, before, unit_offset=unit)
        self.mlp = MLP(size, inner, config.hidden_activation)
        self.post_feedforward_layernorm = RMSNorm(size, eps, unit_offset=unit, factor=scale)

    def spaces(self) -> Spaces | None:
        """Norms make what is added to the residual stream: only values can be turned."""
        width = self.self_attn.heads.dim
        return Spaces(values=("self_attn.v_proj", "self_attn.o_proj", width))

    def kept(self, flow: Flow, memory: Memory) -> Any:
        """The memory that gives attention its keys and values."""
        return memory[self.kind.name]

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        cos, sin, mask = (flow[name] for name in self.kind.reads)
        x = self.self_attn(self.input_layernorm(h), cos, sin, mask, self.kept(flow, memory))
        h = h + self.post_attention_layernorm(x)
        x = self.mlp(self.pre_feedforward_layernorm(h))
        flow["hidden"] = h + self.post_feedforward_layernorm(x)
