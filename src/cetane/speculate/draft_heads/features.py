"""The features that draft heads read: hidden states from the target's decoding calls."""

from collections.abc import Sequence

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import columns
from cetane.engine.schedule import adapted
from cetane.errors import CetaneError
from cetane.schema.draft_head import HIDDEN, tappable
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan


def tapped_shards(plan: Plan) -> tuple[str, ...]:
    """The shards whose hidden states draft heads may read.

    They are the first, the middle and the last shard that hand one on; with fewer than three, some
    are the same. Raises CetaneError if the last layer's state never leaves its shard: a draft head
    learns the model's answers from it.
    """
    if any(shard.kind == "model" for shard in plan.shards):
        raise CetaneError(
            "draft heads need a shard that hands on the last layer's hidden states: in this "
            "layout, the last layer and the model's head are one shard",
            "port with layout.kind = 'chunks' and layout.head = 'apart'",
        )
    shards = tappable(plan)
    return (shards[0], shards[len(shards) // 2], shards[-1])


def tapped_blocks(plan: Plan) -> tuple[str, ...]:
    """The blocks whose output the `tapped_shards` hand on: the last of each."""
    last = {shard.name: shard.blocks[-1] for shard in plan.shards}
    return tuple(last[name] for name in tapped_shards(plan))


def handing_steps(plan: Plan) -> frozenset[Step | Route]:
    """The steps whose hidden state is the one that their shard hands on.

    In a shard that routes, an earlier step of the call makes one too: its experts add to that.
    """
    found: set[Step | Route] = set()
    for capacity in plan.capacities:
        for modes in adapted(capacity).values():
            for mode in modes.values():
                last = {s.shard: s for s in mode.steps if makes_hidden(plan, s)}
                found.update(last.values())
    return frozenset(found)


def makes_hidden(plan: Plan, step: Step | Route) -> bool:
    """Whether a step has a hidden state among its outputs."""
    name = step.function if isinstance(step, Step) else step.experts[0][0]
    return any(item.name == HIDDEN for item in plan.functions[step.shard, name].outputs)


class Taps:
    """Collects the hidden states of one session, and drops those of refused tokens.

    The session must be opened with `watch=[taps.see]` and `whole=True`.
    """

    def __init__(self, plan: Plan, shards: tuple[str, ...]) -> None:
        self.hidden, self.shards, self.steps = plan.hidden, shards, handing_steps(plan)
        self.rows: dict[str, list[Array]] = {shard: [] for shard in shards}
        self.taken = 0
        """The position up to which `take` has returned hidden states."""

    def see(self, step: Step | Route, name: str, value: Array, valid: int) -> None:
        """Keep an output, if it is the hidden state that one of the shards hands on."""
        if name == HIDDEN and step.shard in self.rows and step in self.steps:
            self.rows[step.shard].append(columns(value)[:, :valid].T.astype(np.float32))

    @property
    def waiting(self) -> int:
        """The number of positions that were computed and not taken yet."""
        return sum(map(len, self.rows[self.shards[0]]))

    @property
    def width(self) -> int:
        """The columns of the newest call that is not taken yet; 0 if there is none."""
        newest = self.rows[self.shards[0]][-1:]
        return len(newest[0]) if newest else 0

    def take(self, position: int, path: Sequence[int] | None = None) -> Array:
        """The hidden states since the last `take`, up to `position`: fp32 `(n, shards, C)`.

        `path` are the accepted columns of the last call (`Session.path`).
        """
        count, self.taken = position - self.taken, position
        seen = [self.rows[shard] for shard in self.shards]
        self.rows = {shard: [] for shard in self.shards}
        if not count:
            return np.empty((0, len(self.shards), self.hidden), np.float32)
        if path is not None:
            seen = [[*rows[:-1], rows[-1][list(path)]] for rows in seen]
        return np.stack([np.concatenate(rows)[:count] for rows in seen], 1)
