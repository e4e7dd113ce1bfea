"""The work of a decoder, from its shapes alone, for measurements of models that others ported.

The bytes that a graph moves are those of its operations in the ports' own graphs. They treat the
cache in one of these ways (`Contract`), or have `none`:

- `blended`: an MLState, blended with the new columns (`COPIES`);
- `stateful`: an MLState, written in place and copied out;
- `io`: the whole cache comes in and goes out as tensors, shifted if there is a window, else
  blended.

Attention reads keys and values once. If a port repeats them for the query heads, the copies are
written and read as well.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Literal

from pydantic import Field

from cetane.files import shipped_text
from cetane.perf.cost import Work
from cetane.validation import Data

Contract = Literal["blended", "stateful", "io", "none"]
COPIES = {"blend": 6, "shift": 2, "copy": 2}
"""Passes over a cache. In a blend, `cache * (1 - m)` reads and writes it, `new @ m` writes one, and
their sum reads two and writes one. A shift's concatenation reads and writes; so does a copy."""
Bits = Mapping[str, float]
"""Bits per weight of `attention`, `mlp` and `head`."""
HALF = 2
"""Bytes of a key or value."""


class Layer(Data):
    """One decoder layer: its weights, and for each slot the channels of queries, keys and cache."""

    attention: int
    mlp: int
    query: int
    keys: int
    """Channels of the keys that it reads."""
    cache: int
    """Channels of the keys that it keeps, 0 if it reads those of another layer."""
    window: int | None = None

    def copies(self, contract: Contract) -> int:
        """The passes of a call over the layer's own cache, beside those of attention."""
        match contract:
            case "blended":
                return COPIES["blend"]
            case "stateful":
                return COPIES["copy"]
            case "io":
                return COPIES["shift" if self.window else "blend"]
            case "none":
                return 0


class Decoder(Data):
    """A `[model]` of `data/evidence/models.toml`, which explains the fields."""

    source: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    calls: int | None = None
    repeats_keys: bool = False
    full_every: int | None = None
    full_head_dim: int = 0
    window: int | None = None
    cache_dim: int = 0
    own_layers: int | None = None
    shared_mlp: int | None = None
    per_layer: int = 0
    experts: int = 0
    chunks: dict[int, tuple[int, ...]] = Field(default_factory=dict)

    @property
    def head(self) -> int:
        """Weights of the output projection."""
        return self.vocab * self.hidden

    def owns(self, index: int) -> bool:
        """Whether a layer has a cache of its own."""
        return self.own_layers is None or index < self.own_layers

    def layer(self, index: int) -> Layer:
        full = self.full_every is None or (index + 1) % self.full_every == 0
        dim = self.full_head_dim if full and self.full_head_dim else self.head_dim
        projections = 2 * self.query_heads * dim + 2 * self.kv_heads * dim * self.owns(index)
        inner = self.mlp if self.owns(index) else self.shared_mlp or self.mlp
        return Layer(
            attention=self.hidden * (projections + 2 * self.per_layer),
            mlp=3 * self.hidden * inner,
            query=self.query_heads * dim,
            keys=self.kv_heads * dim,
            cache=self.kv_heads * (self.cache_dim or dim) * self.owns(index),
            window=None if full else self.window,
        )

    def shared(self, slots: int) -> int:
        """Bytes of the caches that layers without own caches read."""
        if self.own_layers is None:
            return 0
        window = min(self.window or slots, slots)
        return 2 * HALF * self.kv_heads * (slots * self.full_head_dim + window * self.head_dim)

    def program(
        self,
        start: int,
        stop: int,
        slots: int,
        bits: Bits,
        contract: Contract,
        head: bool = False,
        tokens: int = 1,
        full_slots: int | None = None,
    ) -> Work:
        """The work of one call of the layers `start` to `stop`, with or without the output
        projection.

        `full_slots` are the slots of full attention, if a window limits it too.
        """
        weights: dict[float, float] = {}
        memory = border = macs = 0
        full = full_slots or slots

        def add(kind: str, count: int) -> None:
            weights[bits[kind]] = weights.get(bits[kind], 0) + count

        for index in range(start, stop):
            layer = self.layer(index)
            seen = full if layer.window is None else min(layer.window, slots)
            add("attention", layer.attention)
            add("mlp", layer.mlp)
            memory += 2 * HALF * seen * (layer.keys + 2 * layer.query * self.repeats_keys)
            macs += 2 * layer.query * seen * tokens
            own = 2 * HALF * layer.cache * seen
            memory += layer.copies(contract) * own
            border += 2 * own * (contract == "io")
        if self.per_layer and start == 0:
            add("attention", self.layers * self.per_layer * self.hidden)
        if head:
            add("head", self.head)
        own_layers = self.own_layers or 0
        makes, reads = start < own_layers <= stop < self.layers, 0 < own_layers <= start
        if makes or reads:
            border += self.shared(full)
        return Work(
            tokens=tokens, weights=weights, attention_macs=macs, memory=memory, border=border
        )

    def chunked(
        self,
        cuts: tuple[int, ...],
        slots: int,
        bits: Bits,
        contract: Contract,
        tokens: int = 1,
        full_slots: int | None = None,
    ) -> list[Work]:
        """The programs of a model that is cut at these layers. The last has the output
        projection."""
        return [
            self.program(a, b, slots, bits, contract, b == self.layers, tokens, full_slots)
            for a, b in pairwise((0, *cuts, self.layers))
        ]


@cache
def load_decoders() -> dict[str, Decoder]:
    """The models of the evidence, by their names in its rows."""
    text = shipped_text("data/evidence/models.toml")
    return {name: Decoder.model_validate(body) for name, body in tomllib.loads(text).items()}
