"""Gemma 4, dense text models (E2B, E4B).

Sliding and full layers have attention heads of different widths. Every layer has an embedding of
its own, and the last layers read the caches of earlier ones. The truth is transformers'
`modeling_gemma4.py`:

- Scores are not scaled, and values are normed without gains.
- Full layers turn a quarter of their pairs ("proportional" rotary embedding).
- A scalar multiplies every layer's output.
- The last layers project no keys and values. The last layer of their kind that does hands its keys
  and values on, as tensors, to every shard that needs them.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.axes import Axes
from cetane.families.base import Block, Flow, Memory, Truth, Weight
from cetane.families.configs import invalid, unsupported
from cetane.families.decoder import decoder_model
from cetane.families.gemma import (
    GemmaConfig,
    GemmaLayer,
    GemmaOptions,
    make_kind,
)
from cetane.families.grouped_query import AttentionHeads, KeysOrValues, Rounded
from cetane.families.kinds import KINDS, LayerKind, kind_names
from cetane.families.layers import Held, Leaf, Projection, RMSNorm, activation, normalize
from cetane.families.model import Model, StoredTable, TokenTable
from cetane.families.options import residual_eps
from cetane.families.rotary import RotaryConfig
from cetane.schema.interface import Embedding

Options = GemmaOptions
MODEL_TYPES = ("gemma4_text",)
Sharing = Literal["store", "reuse"]
"""`store`: a layer hands its keys and values on. `reuse`: it reads those of another layer."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class LayerConfig(RotaryConfig, Protocol):
    """The keys that a Gemma4TextConfig has for each type of layer."""

    num_key_value_heads: int
    head_dim: int


class Gemma4Config(GemmaConfig, Protocol):
    """The keys that are read from a Gemma4TextConfig."""

    num_hidden_layers: int
    enable_moe_block: bool
    use_double_wide_mlp: bool
    attention_k_eq_v: bool
    hidden_size_per_layer_input: int | None
    vocab_size_per_layer_input: int
    num_kv_shared_layers: int
    kv_sharing_modes: list[Sharing | None]
    per_layer_config: dict[str, LayerConfig]


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
        self, x: Tensor, turn: Callable[[Tensor], Tensor], flow: Flow, memory: Memory
    ) -> tuple[KeysOrValues, KeysOrValues]:
        seen = super().keys_values(x, turn, flow, memory)
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
        self, x: Tensor, turn: Any, flow: Flow, memory: Any
    ) -> tuple[KeysOrValues, KeysOrValues]:
        keys, values = (flow[name] for name in shared_names(self.kind.name))
        return keys, values


class Scalar(Leaf):
    """A factor that a layer learned: one number."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hold("value", (1, 1, 1, 1), (1,))


class Gemma4Layer(GemmaLayer):
    """A layer of Gemma 4. It may hand its keys and values on, or read another layer's.

    It may also have an input of its own: `width` channels of the tensor `per_layer`.
    """

    def __init__(
        self,
        config: Gemma4Config,
        index: int,
        kind: LayerKind,
        mode: Sharing | None,
        same: bool,
        scale: float,
    ) -> None:
        size, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        form = AttentionForm(qkv_bias=bias, out_bias=bias, norms="head")
        reuses = mode == "reuse"
        attention = (
            SharedAttention(size, eps, kind, form)
            if reuses
            else OwnAttention(size, eps, kind, form, same, mode == "store")
        )
        wide = 2 if reuses and config.use_double_wide_mlp else 1
        super().__init__(config, index, attention, wide * config.intermediate_size, False, scale)
        self.reuses, self.shared = reuses, shared_names(kind.name)
        if mode == "store":
            self.writes = ("hidden", *self.shared)
        self.width = config.hidden_size_per_layer_input or 0
        if self.width:
            self.reads = (*self.reads, "per_layer")
            # Only this module reads the residual stream without a norm before it.
            self.per_layer_input_gate = Projection(size, self.width, "per_layer", factor=1 / scale)
            self.per_layer_projection = Projection(self.width, size, "per_layer")
            self.post_per_layer_input_norm = RMSNorm(size, eps, factor=scale)
            self.act = activation(config.hidden_activation)
        self.layer_scalar = Scalar()

    def spaces(self) -> None:
        """Nothing turns: values may be keys too, or another layer's."""
        return

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("layer_scalar.value", "layer_scalar"), shape, held)

    def forward(self, flow: Flow, memory: Memory) -> None:
        super().forward(flow, memory)
        h = flow["hidden"]
        if self.width:
            start = self.layer * self.width
            own = flow["per_layer"][:, start : start + self.width]
            x = self.per_layer_projection(self.act(self.per_layer_input_gate(h)) * own)
            h = h + self.post_per_layer_input_norm(x)
        flow["hidden"] = h * self.layer_scalar.value


def shared_names(kind: str) -> tuple[str, str]:
    """The names of the tensors that carry the keys and values of a kind of layers."""
    return f"shared_{kind}_k", f"shared_{kind}_v"


class PerLayerInputs(Block):
    """The block that makes the input of every layer: `width` channels for each layer.

    It adds the token's row of a second embedding and a projection of the first embedding.
    """

    reads = ("hidden", "per_layer_tokens")
    writes = ("per_layer",)

    def __init__(self, config: Gemma4Config, width: int, scale: float) -> None:
        super().__init__("per-layer-inputs", 0, "model.")
        self.count, self.width = config.num_hidden_layers, width
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


def author(config: Gemma4Config, options: GemmaOptions) -> Model:
    """The model of a Gemma4TextConfig."""
    check(config)
    names, scale, size = kind_names(config), options.scale, config.hidden_size
    modes, kinds = layer_modes(config, options)
    width = config.hidden_size_per_layer_input or 0
    with torch.device("meta"):
        layers: list[Block] = [PerLayerInputs(config, width, scale)] if width else []
        for index, name in enumerate(names):
            same = config.attention_k_eq_v and name == "full"
            layers.append(Gemma4Layer(config, index, kinds[name], modes[index], same, scale))
    tables, own = {}, {}
    if width:
        rows, wide = config.vocab_size_per_layer_input, config.num_hidden_layers * width
        own = {"per_layer": wide, "per_layer_tokens": wide}
        stored = StoredTable("model.embed_tokens_per_layer.weight", factor=width**0.5)
        tables["per_layer"] = TokenTable(rows, wide, stored)
    shared = {
        tensor: names[index]
        for index, mode in enumerate(modes)
        if mode == "store"
        for tensor in shared_names(names[index])
    }
    return decoder_model(
        config,
        layers,
        scale,
        kinds.values(),
        embedding=size**0.5,
        host={"per_layer_tokens": Embedding(table="per_layer")} if width else {},
        channels=own,
        shared=shared,
        tables=tables,
        softcap=config.final_logit_softcapping,
    )


def check(config: Gemma4Config) -> None:
    """Raise CetaneError for a config that is not supported or not consistent."""
    kind = config.model_type
    if config.enable_moe_block:
        raise unsupported(kind, "enable_moe_block, its mixtures of experts")
    if len(config.layer_types) != config.num_hidden_layers:
        raise invalid(
            kind,
            f"layer_types has {len(config.layer_types)} entries, num_hidden_layers = "
            f"{config.num_hidden_layers}",
        )
    if config.num_kv_shared_layers == config.num_hidden_layers:
        # An assistant's layers read the keys of another model.
        raise invalid(
            kind,
            f"num_kv_shared_layers = {config.num_kv_shared_layers} leaves no layer that makes keys "
            "and values",
        )
    rows = config.vocab_size_per_layer_input
    if config.hidden_size_per_layer_input and rows < config.vocab_size:
        raise invalid(
            kind,
            f"vocab_size_per_layer_input = {rows}, less than vocab_size = {config.vocab_size}",
        )


def layer_modes(
    config: Gemma4Config, options: GemmaOptions
) -> tuple[list[Sharing | None], dict[str, LayerKind]]:
    """The sharing of keys and values by every layer, and the kinds of layers by name."""
    try:
        modes = config.kv_sharing_modes
        own = {kind: config.per_layer_config[kind] for kind in dict.fromkeys(config.layer_types)}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise invalid(config.model_type, str(error)) from error
    kinds = {}
    for layer_type, of in own.items():
        query, kv, dim = config.num_attention_heads, of.num_key_value_heads, of.head_dim
        if not (dim > 0 and 0 < kv <= query and query % kv == 0):
            raise invalid(
                config.model_type,
                f"{query} query heads of {dim} channels for {kv} key/value heads",
            )
        block = options.full_block if layer_type == "full_attention" else None
        heads = AttentionHeads(query, kv, dim, 1.0, block)
        kinds[KINDS[layer_type]] = make_kind(config, of, layer_type, heads, options)
    return modes, kinds
