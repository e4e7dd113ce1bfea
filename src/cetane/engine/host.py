"""What the host supplies to a call: embedding rows, rotary rows, masks, write masks, positions."""

from dataclasses import dataclass

import numpy as np

from cetane.bundle.tables import Tables
from cetane.engine.backend import Array
from cetane.schema.interface import (
    MASKED,
    Embedding,
    Input,
    Mask,
    Order,
    Position,
    Rotary,
    TokenIds,
    WriteMask,
    hidden_shape,
)
from cetane.schema.slots import Slots

EMPTY = -1
"""Position of a slot that holds nothing."""


@dataclass(frozen=True)
class Placed:
    """Where a call's columns go in the caches of a group, and what it sees there.

    Slots and keys are given by the positions that they hold, EMPTY where there is none.
    """

    slots: Array
    """After the call."""
    keys: Array
    """All that the call sees."""
    targets: Array
    """The slot of every token; of no meaning where columns shift."""


def place(group: Slots, held: Array, positions: Array, width: int) -> Placed:
    """The columns of a call among the slots `held` before it; what is beyond `positions`, up to
    its width, is padding."""
    reads, count = group.form(width) == "readonly", len(positions)
    padded = np.concatenate([positions, np.full(width - count, EMPTY)])
    targets = np.array([group.of(position) for position in positions])
    if group.contract == "shift" and not reads:  # a graph cannot tell the padding
        after = np.concatenate([held, padded])[width:]
    else:
        after = accepted(group, held, positions, width, count)
    keys = np.concatenate([held, padded]) if reads else after
    return Placed(after, keys, targets)


def accepted(group: Slots, held: Array, positions: Array, width: int, count: int) -> Array:
    """The slots after a call of which the first `count` positions count."""
    if group.contract == "shift":
        return np.concatenate([held, positions[:count]])[count:]
    after, targets = held.copy(), np.array([group.of(position) for position in positions])
    if group.contract == "stateful":  # it was written all the same
        after[targets[0] : targets[0] + width] = EMPTY
    after[targets[:count]] = positions[:count]  # of equal targets, the last counts
    return after


def room(group: Slots, position: int) -> int | None:
    """How many columns fit in one call of a contract that writes slots in a row; None for any."""
    if group.contract != "stateful" or not group.limited:
        return None
    return group.count - group.of(position)


@dataclass(frozen=True)
class Call:
    """One call: `tokens` of it at `positions`, in a function `width` tokens wide."""

    tokens: Array
    positions: Array
    width: int
    order: Order
    groups: dict[str, Placed]
    """By cache group."""


def host_input(item: Input, call: Call, tables: Tables, dtype: type) -> Array:
    """The array for an input that the host supplies, in the shape that the graph wants."""
    source = item.source
    valid = len(call.tokens)
    if isinstance(source, Embedding):
        found = tables.rows(source.table)[call.tokens]
        rows: Array = np.zeros((found.shape[1], call.width), dtype)
        rows[:, :valid] = found.T
        return rows.reshape(hidden_shape(call.order, len(rows), call.width))
    if isinstance(source, TokenIds):
        ids: Array = np.zeros((1, call.width), np.int32)
        ids[0, :valid] = call.tokens
        return ids
    if isinstance(source, Rotary):
        table = tables.rotary[source.table][0 if source.part == "cos" else 1]
        rows = np.zeros((table.shape[1], call.width), dtype)
        rows[:, :valid] = table[call.positions].T
        return rows[None, None]
    if isinstance(source, Mask):
        keys = call.groups[source.group].keys
        queries = np.full((call.width, 1), EMPTY)
        queries[:valid, 0] = call.positions
        distance = queries - keys
        seen = (keys != EMPTY) & (distance >= 0)
        if source.window is not None:
            seen &= (distance < source.window) | (keys < source.sinks)
        return np.where(seen, 0, MASKED).astype(dtype)[None, None]
    if isinstance(source, WriteMask):
        group = call.groups[source.group]
        write: Array = np.zeros((call.width, len(group.slots)), dtype)
        write[np.arange(valid), group.targets] = 1
        return write[None, None]
    assert isinstance(source, Position)
    return call.groups[source.group].targets[:1].astype(np.int32)
