"""Caches of transformers models: one with room for all tokens that will come.

transformers' own copies all keys and values for every token. That took two thirds of the time in
which a small model wrote sequences side by side.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, with room for `(B, heads, length, C)` from the beginning."""

    def __init__(self, length: int) -> None:
        """`length` is the most tokens that the layer can hold."""
        super().__init__()
        self.length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.room = [
            one.new_empty(*one.shape[:2], self.length, one.shape[3])
            for one in (key_states, value_states)
        ]
        self.keys, self.values = (room[:, :, :0] for room in self.room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add columns; returns all keys and values until now, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.keys.shape[2]
        after = before + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self.room)
        return self.keys, self.values


def roomy_cache(model: Any, length: int) -> DynamicCache:
    """An empty cache for `length` tokens of a model. Layers that keep a window stay transformers'
    own."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        RoomyLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def extending(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """The arguments with which a transformers model reads a cache and extends it.

    The cache's own argument was called `past_key_values`, which transformers 5.40 removes.
    """
    known = signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
