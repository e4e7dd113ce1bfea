"""Kinds of layers, as sliding and full ones: the heads, caches, masks and rotary tables of each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from cetane.families.base import Flow
from cetane.families.configs import LARGEST, invalid
from cetane.families.grouped_query import AttentionHeads
from cetane.families.layers import apply_rotary
from cetane.families.model import CacheGroup
from cetane.families.rotary import RotaryTable
from cetane.schema.interface import Mask, Rotary, Source

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Types of layers in the `layer_types` of a config: those with a window, those that see all tokens,
and those that keep a matrix in place of a cache."""
KINDS = {SLIDING: "sliding", FULL: "full"}
"""The names of kinds, by the `layer_types` of a config."""
ALWAYS_WINDOWED = (
    "afmoe", "cohere2", "cwm", "gemma2", "gemma3_text", "gpt_oss", "granite_swa",
    "granitemoe_swa", "ministral", "olmo3", "qwen2_moe", "vaultgemma",
)  # fmt: skip
"""The model types of which transformers makes the mask of a window even if no layer slides."""
ALL = "kv"
"""The cache group of all layers, where their caches have the same length."""
DEFAULT = "default"
"""The rotary table of all layers, where they have the same."""
FARTHEST = float(2**14)
"""The largest distance that a mask with distances tells from a hidden key."""
PARTS: tuple[Literal["cos", "sin"], ...] = ("cos", "sin")
"""The two halves of a rotary table."""


class KindsConfig(Protocol):
    """The keys of a config that say which layers slide."""

    model_type: str
    layer_types: list[str]
    sliding_window: int | None


def check_types(config: KindsConfig, known: Collection[str]) -> None:
    """Raise CetaneError for a type of layers that is not `known`, and for layers that slide without
    a window: transformers has no mask for them."""
    kind = config.model_type
    for layer_type in config.layer_types:
        if layer_type not in known:
            raise invalid(kind, f"layer_types: {layer_type!r}; known: {', '.join(known)}")
    slides = any(KINDS.get(layer_type) == "sliding" for layer_type in config.layer_types)
    if slides and config.sliding_window is None:
        raise invalid(kind, "sliding_window = None, but some layers slide")


def kind_names(config: KindsConfig) -> list[str]:
    """The kind of each layer. CetaneError for a type that is neither sliding nor full, and for a
    window that transformers needs and the config lacks."""
    check_types(config, KINDS)
    if config.model_type in ALWAYS_WINDOWED and config.sliding_window is None:
        raise invalid(
            config.model_type,
            "sliding_window = None, which transformers cannot run: give any number",
        )
    return [KINDS[layer_type] for layer_type in config.layer_types]


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class LayerKind:
    """The attention heads, window, mask and rotary table of one kind of layers."""

    heads: AttentionHeads
    rotary: RotaryTable
    window: int | None = None
    sinks: int = 0
    name: str = ALL
    """The name of their cache group."""
    table: str = DEFAULT
    """The name of their rotary table."""
    positioned: bool = True
    """Whether queries and keys have positions."""
    slopes: tuple[float, ...] = ()
    """What a position of distance takes from the scores of each head (ALiBi, arXiv 2108.12409).
    Each is above 0 and below 1, and each head has keys of its own."""

    def __post_init__(self) -> None:
        """Raises ValueError for a window of no size."""
        if self.window is not None and not 1 <= self.window <= LARGEST:
            raise ValueError(f"sliding_window = {self.window}, not from 1 to {LARGEST}")

    @property
    def mask(self) -> str:
        """The name of their mask."""
        shared = "mask" if self.window is None else "mask_window"
        return shared if self.name == ALL else f"mask_{self.name}"

    @property
    def rotary_names(self) -> tuple[str, ...]:
        """The names of their cosines and sines."""
        parts = PARTS if self.positioned else ()
        return tuple(
            f"rope_{part}" if self.table == DEFAULT else f"{part}_{self.table}" for part in parts
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the host's tensors that they read."""
        return *self.rotary_names, self.mask

    def at_positions(self, flow: Flow) -> Callable[[Tensor], Tensor]:
        """The function that gives queries and keys the positions of the call's tokens."""
        if not self.positioned:
            return as_it_is
        cos, sin = (flow[name] for name in self.rotary_names)
        return partial(apply_rotary, cos=cos, sin=sin, dim=self.rotary.width)

    def biases(self, flow: Flow) -> Tensor:
        """What is added to scores: the mask `(1, 1, G*T, S)`, or one for each head.

        Distances are exact in fp16 up to 2,048, where a sum of biases by absolute position is not.
        """
        if not self.slopes:
            return flow[self.mask]
        name = f"{self.mask}_biases"
        if name not in flow:  # made once for all layers
            mask = flow[self.mask]
            # Each slope is a number of its own: gates know the exact ones behind fp16 numbers.
            far = torch.cat([mask * slope for slope in self.slopes], dim=1)
            # A small slope would leave little of what hides a key.
            hides = torch.minimum(mask + FARTHEST, torch.zeros(1, dtype=mask.dtype))
            flow[name] = far + hides
        return flow[name]

    def host(self) -> dict[str, Source]:
        """The tensors that the host supplies to them."""
        rotary: dict[str, Source] = {
            name: Rotary(table=self.table, part=part)
            for name, part in zip(self.rotary_names, PARTS, strict=False)  # none without positions
        }
        mask = Mask(
            group=self.name,
            window=self.window,
            sinks=self.sinks,
            distances=bool(self.slopes),
        )
        return rotary | {self.mask: mask}

    def group(self) -> CacheGroup:
        """Their caches: as short as the window, unless all layers share the group `ALL`."""
        heads = self.heads
        own = (None, 0) if self.name == ALL else (self.window, self.sinks)
        return CacheGroup(heads.query, heads.kv, heads.dim, *own)
