"""The positions in the slots of a cache group: before a call, during it and after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.schema.slots import ContractName, Slots

EMPTY = -1
"""The position in a slot that holds no token."""


@dataclass(frozen=True)
class CallSlots:
    """The slots of one cache group during a call of `n` tokens and `T` columns, and after it.

    A slot is represented by the position of the token that it holds, or by EMPTY.
    """

    after: Array
    """The position in each slot after the call, int `(S,)`."""
    keys: Array
    """The position of each key to which the call attends. In a `readonly` call these are the slots
    before the call and then its own columns, int `(S + T,)`; else the slots after it, `(S,)`."""
    targets: Array
    """The slot into which each token is written, int `(n,)`. A cache that shifts ignores them."""
    own: Array
    """The index in `keys` of each of the call's own tokens, int `(n,)`."""


def grown(slots: Array, contract: ContractName, count: int, fill: int) -> Array:
    """An array `(..., slots)` with more slots, `(..., count)`. A cache that shifts keeps its newest
    token on the right, so its new slots are on the left."""
    more = count - slots.shape[-1]
    sides = (more, 0) if contract == "shift" else (0, more)
    return np.pad(slots, [(0, 0)] * (slots.ndim - 1) + [sides], constant_values=fill)


def depths(parents: Sequence[int]) -> Array:
    """The depth of every token of a tree; 0 for tokens that follow the text before the tree."""
    result: list[int] = []
    for parent in parents:
        result.append(result[parent] + 1 if parent >= 0 else 0)
    return np.array(result)


def call_slots(
    group: Slots, held: Array, columns: Array, positions: Array, width: int
) -> CallSlots:
    """The slots of a call of `width` columns, in a group whose slots hold the positions
    `held (slots,)`.

    `columns (n,)` are the positions of its tokens if they were a line; they decide the slots.
    `positions (n,)` are their true positions. All further columns are padding.
    """
    reads, count = group.contract_for(width) == "readonly", len(positions)
    padded = np.concatenate([positions, np.full(width - count, EMPTY)])
    targets = np.array([group.of(column) for column in columns])
    shifts = group.shifts and not reads
    if shifts:  # a graph cannot tell the padding
        after = np.concatenate([held, padded])[width:]
    else:
        after = slots_after(group, held, columns, positions, width)
    keys = np.concatenate([held, padded]) if reads else after
    own = len(keys) - width + np.arange(count) if reads or shifts else targets
    return CallSlots(after, keys, targets, own)


def slots_after(group: Slots, held: Array, columns: Array, kept: Array, width: int) -> Array:
    """The slots `(slots,)` after a call that keeps tokens of the positions `kept (m,)`, in its
    first columns. `held (slots,)` and `columns (n,)` are as in `call_slots`."""
    if group.contract == "shift":
        return np.concatenate([held, kept])[len(kept) :]
    if group.shifts:  # the graph pushed all columns of the call into the state
        refused = np.full(width - len(kept), EMPTY)
        return np.concatenate([held, kept, refused])[width:]
    after, targets = held.copy(), np.array([group.of(column) for column in columns])
    if group.in_state:  # the graph wrote all columns of the call, refused ones too
        written = slice(targets[0], targets[0] + width) if group.writes_padding else targets
        after[written] = EMPTY
    after[targets[: len(kept)]] = kept  # if two positions share a slot, the last stays
    return after
