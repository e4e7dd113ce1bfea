"""What the host supplies to a call: embedding rows, rotary rows, masks, write masks, positions."""

from dataclasses import dataclass

import numpy as np

from cetane.bundle import Tables
from cetane.engine.backend import Array
from cetane.families.flow import Embedding, Input, Mask, Position, Rotary, WriteMask
from cetane.families.layers import MASKED, Order, hidden_shape

EMPTY = -1
"""Position of a slot that holds nothing."""


@dataclass(frozen=True)
class Call:
    """One call: `tokens` of it at `positions`, in a function `width` tokens wide.

    `keys` are the positions of all keys that the call sees, EMPTY where there is none.
    """

    tokens: Array
    positions: Array
    width: int
    slots: Array
    keys: Array
    start: int
    order: Order


def host_input(item: Input, call: Call, tables: Tables, dtype: type) -> Array:
    """The array for an input that the host supplies, in the shape that the graph wants."""
    source = item.source
    valid = len(call.tokens)
    if isinstance(source, Embedding):
        rows = np.zeros((tables.embedding.shape[1], call.width), dtype)
        rows[:, :valid] = tables.embedding[call.tokens].T
        return rows.reshape(hidden_shape(call.order, len(rows), call.width))
    if isinstance(source, Rotary):
        table = tables.rotary[source.table][0 if source.part == "cos" else 1]
        rows = np.zeros((table.shape[1], call.width), dtype)
        rows[:, :valid] = table[call.positions].T
        return rows[None, None]
    if isinstance(source, Mask):
        queries = np.full((call.width, 1), EMPTY)
        queries[:valid, 0] = call.positions
        distance = queries - call.keys
        seen = (call.keys != EMPTY) & (distance >= 0)
        if source.window is not None:
            seen &= distance < source.window
        return np.where(seen, 0, MASKED).astype(dtype)[None, None]
    if isinstance(source, WriteMask):
        write: Array = np.zeros((call.width, len(call.slots)), dtype)
        write[np.arange(valid), call.start + np.arange(valid)] = 1
        return write[None, None]
    assert isinstance(source, Position)
    return np.array([call.start], np.int32)
