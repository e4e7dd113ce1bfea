"""Sliding and full layers: each kind has its own caches, mask and rotary table."""

from collections.abc import Sequence
from dataclasses import dataclass

from cetane.errors import CetaneError
from cetane.families.base import CacheGroup
from cetane.families.layers import AttentionHeads
from cetane.families.rotary import RotaryTable
from cetane.schema.interface import Mask, Rotary, Source

KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
"""The names of kinds, by the `layer_types` of a config."""


def kind_names(layer_types: Sequence[str]) -> list[str]:
    """The kind of each layer. CetaneError for a type that is neither sliding nor full."""
    for layer_type in layer_types:
        if layer_type not in KINDS:
            raise CetaneError(f"layer_types: {layer_type!r} is not one of {', '.join(KINDS)}")
    return [KINDS[layer_type] for layer_type in layer_types]


@dataclass(frozen=True)
class LayerKind:
    """The attention heads, window, mask and rotary table of one kind of layers."""

    name: str
    """The name of their cache group."""
    heads: AttentionHeads
    window: int | None
    rotary: RotaryTable
    sinks: int = 0

    @property
    def reads(self) -> tuple[str, str, str]:
        """The names of their cosines, sines and mask."""
        return f"cos_{self.name}", f"sin_{self.name}", f"mask_{self.name}"

    def host(self) -> dict[str, Source]:
        """The tensors that the host supplies to them."""
        cos, sin, mask = self.reads
        return {
            cos: Rotary(table=self.name, part="cos"),
            sin: Rotary(table=self.name, part="sin"),
            mask: Mask(group=self.name, window=self.window, sinks=self.sinks),
        }

    def group(self) -> CacheGroup:
        return CacheGroup(self.heads.query, self.heads.kv, self.heads.dim, self.window, self.sinks)
