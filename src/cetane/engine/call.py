"""One call of some tokens: where its columns go, and what its shards have computed so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cetane.engine.backend import Array, Arrays
from cetane.engine.logits import Logits
from cetane.schema.function import Route, Step
from cetane.schema.interface import Order, ToCache, ToHistory, hidden_shape


@dataclass(frozen=True)
class CallSlots:
    """The slots of one cache group as a call sees them, and as it leaves them.

    A slot is given by the position that it holds, EMPTY where it holds none.
    """

    after: Array
    """All slots once the call has run, `(S,)`."""
    keys: Array
    """What the call looks at: the slots, and in a `readonly` call its own columns after them."""
    targets: Array
    """The slot that each token is written to; meaningless where a cache shifts."""


@dataclass(frozen=True)
class Call:
    """`tokens` at `positions`, in a function that is `width` tokens wide; the rest is padding."""

    tokens: Array
    positions: Array
    width: int
    order: Order
    groups: Mapping[str, CallSlots]
    """By cache group."""


@dataclass
class Running:
    """A call on its way through the shards."""

    call: Call
    steps: Mapping[str, Sequence[Step | Route]]
    """What each shard does for it, by the shard's name."""
    logits: Logits | None = None
    """Collects its logits; None where they are not wanted."""
    held: bool = False
    """Keep what it writes in `writes`, until the session knows how many tokens are accepted."""
    tensors: Arrays = field(default_factory=dict)
    """What a shard has handed on to later ones, by name."""
    hosted: Arrays = field(default_factory=dict)
    """Inputs that the host has made; several shards read the same."""
    writes: list[tuple[ToCache | ToHistory, Array]] = field(default_factory=list)


def columns(value: Array) -> Array:
    """A hidden tensor, in either order of axes, as `(C, T)`."""
    return value.reshape(value.shape[1], -1)


def hidden(values: Array, width: int, order: Order) -> Array:
    """`(C, n)` as the hidden tensor of a call; columns from `n` to `width` are zeros."""
    padded = np.pad(values, ((0, 0), (0, width - values.shape[1])))
    return padded.reshape(hidden_shape(order, *padded.shape))
