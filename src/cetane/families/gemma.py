"""What Gemma 3 and Gemma 4 have in common: layers of two kinds, sliding and full, each with a
rotary base, caches and masks of its own; norms before and after attention and MLP."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.base import Block, CacheGroup, Flow, Memory
from cetane.families.layers import MLP, Heads, Projection, RMSNorm, attend, rotate
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import RotaryConfig, RotaryTable, rotary_table
from cetane.schema.interface import Mask, Rotary, Source

KINDS = {"sliding_attention": "sliding", "full_attention": "full"}


class GemmaConfig(RotaryConfig, Protocol):
    """What is read of the config of any Gemma."""

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
    """The `[family]` table of a recipe: how layers with full attention attend."""

    full_window: int | None = Field(default=None, ge=1)
    """Tokens that they see, the last ones; their caches stay as short ("WFA" in the published
    ports)."""
    sinks: int = Field(default=0, ge=0)
    """First tokens of the sequence that they see too (arXiv 2309.17453)."""
    full_block: int | None = Field(default=None, ge=1)
    """Keys that they take at a time ("flash decoding")."""

    @model_validator(mode="after")
    def consistent(self) -> Self:
        if self.sinks and self.full_window is None:
            raise ValueError("sinks are for layers with a full_window; without, all is seen")
        return self


@dataclass(frozen=True)
class Kind:
    """What the layers of one kind share."""

    name: str
    """Of their cache group."""
    heads: Heads
    window: int | None
    sinks: int
    rotary: RotaryTable

    @property
    def reads(self) -> tuple[str, str, str]:
        """Cosines, sines and mask."""
        return f"cos_{self.name}", f"sin_{self.name}", f"mask_{self.name}"

    def host(self) -> dict[str, Source]:
        """What the host supplies to them."""
        cos, sin, mask = self.reads
        return {
            cos: Rotary(table=self.name, part="cos"),
            sin: Rotary(table=self.name, part="sin"),
            mask: Mask(group=self.name, window=self.window, sinks=self.sinks),
        }

    def group(self) -> CacheGroup:
        return CacheGroup(self.heads.query, self.heads.kv, self.heads.dim, self.window, self.sinks)


def layer_kinds(config: GemmaConfig) -> list[str]:
    """The kind of every layer; CetaneError for one that is unknown."""
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
    config: GemmaConfig, of: RotaryConfig, layer_type: str, heads: Heads, options: GemmaOptions
) -> Kind:
    """The layers of a type; `of` is the config of one of them."""
    parameters = (config.rope_parameters or {}).get(layer_type)
    if isinstance(parameters, dict) and parameters.get("rope_type", "default") == "default":
        part = parameters.get("partial_rotary_factor", 1.0)
        if part != 1:  # transformers takes no notice of it
            raise CetaneError(f"rope_parameters: partial_rotary_factor = {part} of {layer_type}")
    full = layer_type == "full_attention"
    return Kind(
        name=KINDS[layer_type],
        heads=heads,
        window=options.full_window if full else config.sliding_window,
        sinks=options.sinks if full else 0,
        rotary=rotary_table(of, heads.dim, layer_type),
    )


class GemmaAttention(nn.Module):
    """Queries and keys are normed; `norm` is how (width, axis)."""

    def __init__(self, hidden: int, heads: Heads, bias: bool, eps: float, unit: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = Projection(hidden, heads.query * heads.dim, "attention", bias)
        self.k_proj = Projection(hidden, heads.kv * heads.dim, "attention", bias)
        self.v_proj = Projection(hidden, heads.kv * heads.dim, "attention", bias)
        self.o_proj = Projection(heads.query * heads.dim, hidden, "attention", bias)
        self.q_norm = RMSNorm(heads.dim, eps, axis=2, unit_offset=unit)
        self.k_norm = RMSNorm(heads.dim, eps, axis=2, unit_offset=unit)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, kept: Any) -> Tensor:
        """`kept` is what the layer attends to: its memory, by `keys_values`."""
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        keys, values = self.keys_values(x, cos, sin, kept)
        mixed = attend(rotate(q, cos, sin, heads.dim), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
        heads = self.heads
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        v = self.values(heads.split(self.v_proj(x), heads.kv))
        seen: tuple[Tensor, Tensor] = kept(rotate(k, cos, sin, heads.dim), v)
        return seen

    def values(self, v: Tensor) -> Tensor:
        return v


class GemmaLayer(Block):
    """Attention and MLP, each normed before and after.

    The residual stream may be `scale` times the model's: the norms before do not see it, and those
    after have gains that are smaller by as much.
    """

    def __init__(
        self,
        config: GemmaConfig,
        index: int,
        kind: Kind,
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

    def kept(self, flow: Flow, memory: Memory) -> Any:
        """What attention gets its keys and values from."""
        return memory[self.kind.name]

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        cos, sin, mask = (flow[name] for name in self.kind.reads)
        x = self.self_attn(self.input_layernorm(h), cos, sin, mask, self.kept(flow, memory))
        h = h + self.post_attention_layernorm(x)
        x = self.mlp(self.pre_feedforward_layernorm(h))
        flow["hidden"] = h + self.post_feedforward_layernorm(x)
