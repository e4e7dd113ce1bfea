"""Chosen tokens of a sequence's memory, in caches of a smaller capacity."""

from collections.abc import Iterable

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.memory import Memory, runs
from cetane.engine.slots import EMPTY
from cetane.schema.function import CapacityPlan, Function


class ChosenMemory(Memory):
    """Some tokens of a `whole` memory, in the caches of the `smallest` capacity, at any position.

    The first `chosen` slots hold chosen tokens; the newest tokens take turns in the others. A
    window has the same slots in both, and holds all its tokens. Further tokens may follow, such as
    drafted ones: `follow` drops them. The host must keep all caches (contract `readonly`).
    """

    def __init__(
        self, whole: Memory, smallest: CapacityPlan, functions: Iterable[Function], chosen: int
    ) -> None:
        groups = {
            name: slots if slots.limited else slots.model_copy(update={"sinks": chosen})
            for name, slots in smallest.caches.items()
        }
        super().__init__(groups, functions, whole.order, whole.dtype)
        self.whole, self.capacity = whole, smallest.tokens
        self.held = 0
        """The tokens of the whole memory that it has followed."""

    def grow(self, capacity: int, groups: object) -> None:
        """Keep its capacity: it has room at every position."""

    def choose(self, positions: Array) -> None:
        """Hold the tokens at these positions, int `(n,)`, and the newest ones."""
        for name, group in self.groups.items():
            sources = np.arange(group.sinks) if group.limited else positions
            self.slots[name] = np.full(group.count, EMPTY)
            self._copy(name, np.arange(len(sources)), sources)
        self.position = self.held = 0
        self.follow()

    def follow(self) -> None:
        """Hold the newest tokens of the whole memory, and none that it lacks."""
        end = self.whole.position
        for name, group in self.groups.items():
            turn = group.count - group.sinks
            changed = np.arange(max(self.held, end - turn), max(self.position, end))
            targets = np.array([group.of(position) for position in changed.tolist()], np.int64)
            # A dropped token took the slot of the token `turn` positions before it: copy that back.
            sources = targets if group.limited else np.where(changed < end, changed, changed - turn)
            self._copy(name, targets, sources)
        self.histories, self.matrices = dict(self.whole.histories), dict(self.whole.matrices)
        self.position = self.held = end

    def _copy(self, group: str, targets: Array, sources: Array) -> None:
        """Copy what slots of the whole memory hold into slots of a group."""
        self.slots[group][targets] = self.whole.slots[group][sources]
        for target, source in runs(targets, sources):
            for name, owner in self.group_of.items():
                if owner == group:
                    self.caches[name][..., target] = self.whole.caches[name][..., source]
