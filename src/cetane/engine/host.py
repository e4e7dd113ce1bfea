"""The host's inputs of a call: embedding rows, rotary rows, masks, write masks, positions."""

import numpy as np

from cetane.bundle.tables import Tables
from cetane.engine.backend import Array
from cetane.engine.call import Call, hidden
from cetane.engine.slots import EMPTY
from cetane.schema.interface import (
    MASKED,
    Embedding,
    Input,
    Mask,
    Position,
    PositionRows,
    Rotary,
    TokenIds,
    WriteMask,
)


def host_input(item: Input, call: Call, tables: Tables, dtype: type) -> Array:
    """The array for an input that the host supplies, in the graph's shape.

    Columns of padding are zeros, and masked.
    """
    source = item.source
    valid = len(call.tokens)
    if isinstance(source, Embedding):
        rows: Array = tables.rows(source.table)[call.tokens].T.astype(dtype)
        return hidden(rows, call.width, call.order)
    if isinstance(source, PositionRows):
        rows = tables.rows(source.table)[call.positions].T.astype(dtype)
        return hidden(rows, call.width, call.order)
    if isinstance(source, TokenIds):
        ids: Array = np.zeros((1, call.width), np.int32)
        ids[0, :valid] = call.tokens
        return ids
    if isinstance(source, Rotary):
        table = tables.rotary[source.table][0 if source.part == "cos" else 1]
        angles: Array = np.zeros((table.shape[1], call.width), dtype)
        angles[:, :valid] = table[call.positions].T
        return angles[None, None]
    if isinstance(source, Mask):
        return mask(source, call, dtype)
    if isinstance(source, WriteMask):
        group = call.groups[source.group]
        write: Array = np.zeros((call.width, len(group.after)), dtype)
        write[np.arange(valid), group.targets] = 1
        return write[None, None]
    assert isinstance(source, Position)
    return call.groups[source.group].targets[:1].astype(np.int32)


def mask(source: Mask, call: Call, dtype: type) -> Array:
    """The mask `(1, 1, width, keys)`: 0, or minus the distance, where a token sees a key, else
    MASKED.

    A token of a tree sees only itself and the tokens on the way to it.
    """
    keys = call.groups[source.group].keys
    queries = np.full((call.width, 1), EMPTY)
    queries[: len(call.tokens), 0] = call.positions
    distance = queries - keys
    seen = (keys != EMPTY) & (distance >= 0)
    if source.window is not None:
        seen &= (distance < source.window) | (keys < source.sinks)
    ancestors, own = call.ancestors(), call.groups[source.group].own
    if ancestors is not None:  # a position alone does not tell one branch from another
        seen[: len(own), own] &= ancestors
    shown = -distance if source.distances else 0
    return np.where(seen, shown, MASKED).astype(dtype)[None, None]
