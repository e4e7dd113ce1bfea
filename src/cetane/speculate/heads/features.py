"""The target's hidden states, taken from the calls that decode: what draft heads read."""

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.engine import Session, columns
from cetane.errors import CetaneError
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan

HIDDEN = "hidden_out"


def tapped(plan: Plan) -> tuple[str, ...]:
    """The shards after which heads see the hidden state: the first, the middle and the last one
    (in a layout of fewer than three, some are the same)."""
    shards = [
        shard.name
        for shard in plan.shards
        if shard.kind == "layers"
        and any(item.name == HIDDEN for f in shard.functions for item in f.outputs)
    ]
    if not shards:
        raise CetaneError(
            "draft heads need shards that hand on hidden states, and this layout has none",
            "port with layout.kind = 'chunks'",
        )
    return (shards[0], shards[len(shards) // 2], shards[-1])


class Taps:
    """Collects the hidden states of a session's tokens, in order; those of tokens that were
    evaluated and not accepted are dropped."""

    def __init__(self, session: Session, shards: tuple[str, ...]) -> None:
        self.session, self.shards = session, shards
        self.rows: dict[str, list[Array]] = {shard: [] for shard in shards}
        self.at = session.position
        """The first position that has not been taken."""
        session.watch, session.whole = self.see, True

    def see(self, step: Step | Route, name: str, value: Array, valid: int) -> None:
        if name == HIDDEN and step.shard in self.rows:
            self.rows[step.shard].append(columns(value)[:, :valid].T.astype(np.float32))

    def take(self) -> Array:
        """Of the positions since the last time, fp32 `(n, shards, C)`."""
        count = self.session.position - self.at
        self.at = self.session.position
        found = [self.rows[shard] for shard in self.shards]
        self.rows = {shard: [] for shard in self.shards}
        if not count:
            return np.empty((0, len(self.shards), self.session.plan.hidden), np.float32)
        return np.stack([np.concatenate(rows)[:count] for rows in found], 1)
