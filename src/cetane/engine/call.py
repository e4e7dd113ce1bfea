"""A call of the model: its tokens, the slots of its columns, and its tensors so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cetane.engine.backend import Array, Arrays
from cetane.engine.logits import Logits
from cetane.engine.slots import CallSlots
from cetane.schema.function import Route, Step
from cetane.schema.interface import Kept, Order, hidden_shape
from cetane.schema.recipe import Mode


def line(count: int) -> range:
    """The parents of `count` tokens, each of which follows the one before."""
    return range(-1, count - 1)


@dataclass(frozen=True)
class Call:
    """`tokens (n,)` at `positions (n,)`, in a function of `width` tokens; the rest is padding."""

    tokens: Array
    positions: Array
    width: int
    order: Order
    groups: Mapping[str, CallSlots]
    """Slots, by cache group."""
    parents: tuple[int, ...] | None = None
    """In a tree of tokens, the column of the token before each one; -1 is the last token before the
    call. None for tokens in a line."""

    def ancestors(self) -> Array | None:
        """Whether each token of a tree (row) sees each other one (column), bool `(n, n)`.

        A token sees itself and the tokens on the way to it. None for a line.
        """
        if self.parents is None:
            return None
        sees: Array = np.eye(len(self.parents), dtype=bool)
        for token, parent in enumerate(self.parents):  # a parent comes first
            if parent >= 0:
                sees[token] |= sees[parent]
        return sees


@dataclass
class Running:
    """A call on its way through the shards."""

    call: Call
    steps: Mapping[str, Sequence[Step | Route]]
    """The steps of each shard, by its name."""
    logits: Logits | None = None
    """Collects the logits; None for a silent call."""
    mode: Mode | None = None
    """The mode whose functions it calls; None for a call of a draft head."""
    held: bool = False
    """Whether its columns wait in `writes` until the session knows the accepted tokens."""
    tensors: Arrays = field(default_factory=dict)
    """The tensors for later shards, by name."""
    hosted: Arrays = field(default_factory=dict)
    """The inputs that the host has made; several shards may read one."""
    writes: list[tuple[Kept, Array]] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """What the host does after the call's steps in every shard."""


def columns(value: Array) -> Array:
    """A hidden tensor as `(C, T)`, from either order of axes."""
    return value.reshape(value.shape[1], -1)


def hidden(values: Array, width: int, order: Order) -> Array:
    """The hidden tensor of a call from `(C, n)`; columns from `n` to `width` are zeros."""
    padded = np.zeros((len(values), width), values.dtype)
    padded[:, : values.shape[1]] = values
    return padded.reshape(hidden_shape(order, *padded.shape))
