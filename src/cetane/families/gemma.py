"""The common part of Gemma 2, 3, 3n and 4: sliding and full layers.

Each of the two kinds has its own caches and masks, and from Gemma 3 on its own rotary base. Norms
stand before and after attention and MLP.

Gemma 3n and Gemma 4 have more in common. Every layer may have an embedding of its own. The last
layers may project no keys and values: the last layer of their kind that does hands its own on, as
tensors, to every shard that needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.axes import Axes
from cetane.families.base import Block, Flow, Memory, Truth
from cetane.families.blocks import SandwichBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, Norms, decoder_model
from cetane.families.grouped_query import AttentionHeads, KeysOrValues, Rounded
from cetane.families.kinds import FULL, KINDS, LayerKind
from cetane.families.layers import MLP, Exchange, Projection, RMSNorm, activation, normalize
from cetane.families.model import Model, StoredTable, TokenTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import RotaryConfig, rotary_table
from cetane.schema.interface import Embedding

Sharing = Literal["store", "reuse"]
"""`store`: a layer hands its keys and values on. `reuse`: it reads those of another layer."""


class GemmaConfig(DecoderConfig, Protocol):
    """The keys that are read from the config of every Gemma."""

    head_dim: int
    hidden_activation: str
    attention_bias: bool
    layer_types: list[str]
    sliding_window: int | None
    final_logit_softcapping: float | None


class SharingConfig(GemmaConfig, Protocol):
    """The keys that are read from the config of a Gemma 3n or a Gemma 4."""

    num_hidden_layers: int
    hidden_size_per_layer_input: int | None
    vocab_size_per_layer_input: int
    """Gemma 4 unified has neither."""
    num_kv_shared_layers: int
    kv_sharing_modes: list[Sharing | None]


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


def make_kind(
    config: GemmaConfig,
    of: RotaryConfig,
    layer_type: str,
    heads: AttentionHeads,
    options: GemmaOptions,
) -> LayerKind:
    """A kind of layers; `of` is the config of one such layer."""
    typed = config.model_type not in ("gemma2", "vaultgemma")
    full, name = layer_type == FULL, KINDS[layer_type]
    return LayerKind(
        heads,
        # transformers gives positions to whole heads; `proportional` has pairs with an angle of 0
        rotary_table(of, heads.dim, layer_type if typed else None, part=1.0),
        window=options.full_window if full else config.sliding_window,
        sinks=options.sinks if full else 0,
        name=name,
        table=name,
    )


class GemmaLayer(SandwichBlock):
    """Attention and MLP, each normed before and after."""

    def __init__(
        self,
        config: GemmaConfig,
        index: int,
        attention: Attention,
        inner: int,
        unit: bool,
        scale: float = 1.0,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        mlp = MLP(size, inner, config.hidden_activation)
        before = Norms(config, scale, unit_offset=unit)
        after = partial(RMSNorm, size, eps, unit_offset=unit, factor=scale)
        super().__init__(index, attention, mlp, before, after)

    def exchanges(self) -> tuple[Exchange, ...]:
        """None: a checkpoint may store gains less one, and layers may share values."""
        return ()


class OwnAttention(Attention):
    """Attention of a layer with its own keys and values. Values are normed too.

    If `same`, values are the keys before their norm. If it `hands_on`, all keys and values become
    tensors of the kind's names.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        kind: LayerKind,
        form: AttentionForm,
        same: bool,
        hands_on: bool,
    ) -> None:
        super().__init__(size, eps, kind, form)
        self.eps, self.hands_on = eps, hands_on
        if same:
            self.v_proj = self.k_proj

    @property
    def owns(self) -> bool:
        return not self.hands_on

    def values(self, v: Tensor) -> Tensor:
        return normalize(v, self.heads.dim, self.eps, axis=2)

    def keys_values(
        self, x: Tensor, at_positions: Callable[[Tensor], Tensor], flow: Flow, memory: Memory
    ) -> tuple[KeysOrValues, KeysOrValues]:
        seen = super().keys_values(x, at_positions, flow, memory)
        if self.hands_on:
            plain = (one.widened() if isinstance(one, Rounded) else one for one in seen)
            flow.update(zip(shared_names(self.kind.name), plain, strict=True))
        return seen


class SharedAttention(Attention):
    """Attention of a layer that projects only queries, and reads another layer's keys and
    values."""

    def __init__(self, size: int, eps: float, kind: LayerKind, form: AttentionForm) -> None:
        super().__init__(size, eps, kind, form)
        del self.k_proj, self.v_proj, self.k_norm
        self.reads, self.keeps = (*kind.reads, *shared_names(kind.name)), ()

    @property
    def owns(self) -> bool:
        return False

    def keys_values(
        self, x: Tensor, at_positions: Any, flow: Flow, memory: Any
    ) -> tuple[KeysOrValues, KeysOrValues]:
        keys, values = (flow[name] for name in shared_names(self.kind.name))
        return keys, values


class SharingLayer(GemmaLayer):
    """A layer that may hand its keys and values on, or read another layer's.

    It may also have an input of its own: `width` channels of the tensor `per_layer`.
    """

    def __init__(
        self,
        config: SharingConfig,
        index: int,
        kind: LayerKind,
        mode: Sharing | None,
        inner: int,
        scale: float,
        same: bool = False,
    ) -> None:
        size, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        form = AttentionForm(qkv_bias=bias, out_bias=bias, norms="head")
        attention = (
            SharedAttention(size, eps, kind, form)
            if mode == "reuse"
            else OwnAttention(size, eps, kind, form, same, mode == "store")
        )
        super().__init__(config, index, attention, inner, False, scale)
        if mode == "store":
            self.writes = ("hidden", *shared_names(kind.name))
        self.width = own_width(config)
        if self.width:
            self.reads = (*self.reads, "per_layer")
            # Only this module reads the residual stream without a norm before it.
            self.per_layer_input_gate = Projection(size, self.width, "per_layer", factor=1 / scale)
            self.per_layer_projection = Projection(self.width, size, "per_layer")
            self.post_per_layer_input_norm = RMSNorm(size, eps, factor=scale)
            self.act = activation(config.hidden_activation)

    def spaces(self) -> None:
        """Nothing turns: values may be keys too, or another layer's."""
        return

    def own_input(self, h: Tensor, flow: Flow) -> Tensor:
        """What the layer's own input adds to the residual stream, by that stream."""
        start = self.layer * self.width
        own = flow["per_layer"][:, start : start + self.width]
        x = self.per_layer_projection(self.act(self.per_layer_input_gate(h)) * own)
        added: Tensor = self.post_per_layer_input_norm(x)
        return added


def own_width(config: SharingConfig) -> int:
    """The channels of each layer's own input; 0 for none, as in all of Gemma 4 unified."""
    return getattr(config, "hidden_size_per_layer_input", None) or 0


def shared_names(kind: str) -> tuple[str, str]:
    """The names of the tensors that carry the keys and values of a kind of layers."""
    return f"shared_{kind}_k", f"shared_{kind}_v"


class PerLayerInputs(Block):
    """The block that makes the input of every layer: `width` channels for each layer.

    It adds the token's row of a second embedding and a projection of the first embedding.
    """

    reads = ("hidden", "per_layer_tokens")
    writes = ("per_layer",)

    def __init__(self, config: SharingConfig, scale: float) -> None:
        super().__init__("per-layer-inputs", 0, "model.")
        self.count, self.width = config.num_hidden_layers, own_width(config)
        self.size, self.axes = config.hidden_size, Axes()
        self.per_layer_model_projection = Projection(
            self.size, self.count * self.width, "per_layer"
        )
        eps = residual_eps(config.rms_norm_eps, scale)
        self.per_layer_projection_norm = RMSNorm(self.width, eps, axis=2)

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        x = self.per_layer_model_projection(flow["hidden"]) * self.size**-0.5
        x = self.per_layer_projection_norm(x.reshape(1, self.count, self.width, -1))
        x = x.reshape(self.axes.shape(self.count * self.width, -1))
        flow["per_layer"] = (x + flow["per_layer_tokens"]) * 2**-0.5


def sharing_model(
    config: SharingConfig,
    layers: Sequence[Block],
    scale: float,
    kinds: Mapping[str, LayerKind],
    names: Sequence[str],
    channels: Mapping[str, int] = {},
) -> Model:
    """The model of a Gemma 3n or a Gemma 4. `kinds` are by name, `names` those of each layer;
    `channels` are of tensors beside `hidden` and `per_layer`."""
    width = own_width(config)
    tables, own = {}, {}
    if width:
        rows, wide = config.vocab_size_per_layer_input, config.num_hidden_layers * width
        own = {"per_layer": wide, "per_layer_tokens": wide}
        stored = StoredTable("model.embed_tokens_per_layer.weight", factor=width**0.5, rows=rows)
        tables["per_layer"] = TokenTable(max(rows, config.vocab_size), wide, stored)
    shared = {
        tensor: name
        for name, mode in zip(names, config.kv_sharing_modes, strict=True)
        if mode == "store"
        for tensor in shared_names(name)
    }
    return decoder_model(
        config,
        layers,
        scale,
        kinds.values(),
        embedding=config.hidden_size**0.5,
        host={"per_layer_tokens": Embedding(table="per_layer")} if width else {},
        channels={**own, **channels},
        shared=shared,
        tables=tables,
        softcap=config.final_logit_softcapping,
    )


def check_sharing(config: SharingConfig) -> list[Sharing | None]:
    """The sharing of keys and values by every layer. CetaneError for one that is not consistent."""
    kind, layers, count = config.model_type, config.layer_types, config.num_hidden_layers
    if len(layers) != count:
        raise invalid(kind, f"layer_types has {len(layers)} entries, num_hidden_layers = {count}")
    if not 0 <= config.num_kv_shared_layers < count:
        # An assistant's layers read the keys of another model.
        raise invalid(
            kind,
            f"num_kv_shared_layers = {config.num_kv_shared_layers} leaves no layer that makes keys "
            "and values",
        )
    try:
        return config.kv_sharing_modes
    except ValueError as error:
        raise invalid(kind, str(error)) from error
