"""Gemma 4, dense text models (E2B, E4B), and Gemma 4 unified (12B).

Sliding and full layers have attention heads of different widths. Every layer has an embedding of
its own, and the last layers read the caches of earlier ones (`gemma.py`). The truth is
transformers' `modeling_gemma4.py` and `modeling_gemma4_unified.py`:

- Scores are not scaled, and values are normed without gains.
- Full layers give positions to a quarter of their pairs ("proportional" rotary embedding).
- A scalar multiplies every layer's output.
- Layers of Gemma 4 unified have no inputs of their own.
"""

from typing import Protocol

import torch
from torch import Tensor

from cetane.families.base import Block, Flow, Memory, Weight
from cetane.families.configs import invalid, unsupported
from cetane.families.gemma import (
    GemmaOptions,
    PerLayerInputs,
    Sharing,
    SharingConfig,
    SharingLayer,
    check_sharing,
    make_kind,
    own_width,
    sharing_model,
)
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import FULL, KINDS, LayerKind, kind_names
from cetane.families.layers import Held, Leaf
from cetane.families.model import Model
from cetane.families.rotary import RotaryConfig

Options = GemmaOptions
MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")

__all__ = ["MODEL_TYPES", "Options", "author"]


class LayerConfig(RotaryConfig, Protocol):
    """The keys that a Gemma4TextConfig has for each type of layer."""

    num_key_value_heads: int
    head_dim: int


class Gemma4Config(SharingConfig, Protocol):
    """The keys that are read from a Gemma4TextConfig."""

    enable_moe_block: bool
    """Gemma 4 unified lacks it."""
    use_double_wide_mlp: bool
    attention_k_eq_v: bool
    per_layer_config: dict[str, LayerConfig]


class Scalar(Leaf):
    """A factor that a layer learned: one number."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hold("value", (1, 1, 1, 1), (1,))


class Gemma4Layer(SharingLayer):
    """A layer of Gemma 4."""

    def __init__(
        self,
        config: Gemma4Config,
        index: int,
        kind: LayerKind,
        mode: Sharing | None,
        same: bool,
        scale: float,
    ) -> None:
        wide = 2 if mode == "reuse" and config.use_double_wide_mlp else 1
        super().__init__(config, index, kind, mode, wide * config.intermediate_size, scale, same)
        self.layer_scalar = Scalar()

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("layer_scalar.value", "layer_scalar"), shape, held)

    def forward(self, flow: Flow, memory: Memory) -> None:
        super().forward(flow, memory)
        h = flow["hidden"]
        if self.width:
            h = h + self.own_input(h, flow)
        flow["hidden"] = h * self.layer_scalar.value


def author(config: Gemma4Config, options: GemmaOptions) -> Model:
    """The model of a Gemma4TextConfig."""
    check(config)
    names, scale = kind_names(config), options.scale
    modes, kinds = check_sharing(config), layer_kinds(config, options)
    layers: list[Block] = []
    with torch.device("meta"):
        if own_width(config):
            layers.append(PerLayerInputs(config, scale))
        for index, name in enumerate(names):
            same = config.attention_k_eq_v and name == "full"
            layers.append(Gemma4Layer(config, index, kinds[name], modes[index], same, scale))
    return sharing_model(config, layers, scale, kinds, names)


def check(config: Gemma4Config) -> None:
    """Raise CetaneError for a config that is not supported or not consistent."""
    kind = config.model_type
    if getattr(config, "enable_moe_block", False):
        raise unsupported(kind, "enable_moe_block, its mixtures of experts")
    if own_width(config) and (rows := config.vocab_size_per_layer_input) < config.vocab_size:
        raise invalid(
            kind,
            f"vocab_size_per_layer_input = {rows}, less than vocab_size = {config.vocab_size}",
        )


def layer_kinds(config: Gemma4Config, options: GemmaOptions) -> dict[str, LayerKind]:
    """The kinds of layers by name."""
    try:
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
        block = options.full_block if layer_type == FULL else None
        heads = AttentionHeads(query, kv, dim, 1.0, block)
        kinds[KINDS[layer_type]] = make_kind(config, of, layer_type, heads, options)
    return kinds
