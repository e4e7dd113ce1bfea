"""The schedule: cuts tokens into calls, each with a mode, a width and steps."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cetane.errors import CetaneError
from cetane.schema.function import CapacityPlan, ModePlan, Route, Step
from cetane.schema.interface import FromHistory, FromMatrix, ToChoice, ToLogits
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.schema.slots import Slots

Wanted = Literal["none", "last", "all"]
"""The tokens of a feed for which the caller needs logits."""
Steps = Mapping[str, Sequence[Step | Route]]
"""Steps by shard."""


@dataclass(frozen=True)
class ScheduledCall:
    """A planned call, in a mode, for the next `count` tokens."""

    mode: Mode
    count: int
    logits: bool
    """Whether it computes logits; otherwise it is a silent call."""


class Schedule:
    """Cuts tokens into calls. It knows widths and contracts; of a sequence it knows only the
    position."""

    def __init__(self, plan: Plan, modes: Collection[Mode] | None = None, whole: bool = False):
        """`modes`: use only these. `whole`: run all layers for every token, also in calls that
        need no logits (`Session`)."""
        self.modes = {m: plan.modes[m] for m in plan.modes if modes is None or m in modes}
        self.groups: Collection[Slots] = plan.caches.values()
        self.context = plan.recipe.cache.context
        self.capacities: Sequence[CapacityPlan] = plan.capacities
        self.whole = whole
        self.no_trees = no_trees(plan)
        """The reason why calls of this plan cannot hold trees of tokens; None if they can."""
        self._steps = {
            (capacity.tokens, adapter, mode, logits): by_shard(steps)
            for capacity in self.capacities
            for adapter, modes in adapted(capacity).items()
            for mode in self.modes
            for logits, steps in ((True, modes[mode].steps), (False, modes[mode].silent))
        }
        self._padding_takes_slots = any(group.writes_padding for group in self.groups)
        self._skipping = {mode for mode, chosen in self.modes.items() if skips(plan, chosen)}
        """Modes whose silent calls skip layers beside the head."""

    def steps(self, capacity: int, mode: Mode, logits: bool, adapter: str | None = None) -> Steps:
        """The steps of every shard in a call, with an adapter or without."""
        return self._steps[capacity, adapter, mode, logits]

    def capacity(self, position: int, tokens: int, mode: Mode) -> CapacityPlan:
        """The smallest capacity that holds a call of the next `tokens` tokens.

        The modes and widths of calls do not depend on capacities. So they are those of a plan that
        has only the largest.
        """
        columns = self.modes[mode].tokens if self._padding_takes_slots else tokens
        fitting = (one for one in self.capacities if position + columns <= one.tokens)
        return next(fitting, self.capacities[-1])

    def cut(self, position: int, tokens: int, wanted: Wanted) -> list[ScheduledCall]:
        """The calls for the next `tokens` tokens. Raises CetaneError if they do not fit."""
        return list(self._cut(position, tokens, wanted))

    def _cut(self, position: int, tokens: int, wanted: Wanted) -> Iterator[ScheduledCall]:
        self.check_room(position, tokens)
        while tokens:
            mode, count = self._next(position, tokens, wanted)
            position, tokens = position + count, tokens - count
            last = wanted == "last" and not tokens
            whole = self.whole and mode in self._skipping
            yield ScheduledCall(mode, count, wanted == "all" or last or whole)

    def _next(self, position: int, tokens: int, wanted: Wanted) -> tuple[Mode, int]:
        """The mode of the next call, and its number of tokens.

        If silent calls skip layers, the last token gets a call of its own, which gives its logits.
        """
        mode = self.choose(position, tokens)
        skips = mode in self._skipping and not self.whole
        skips = skips and wanted == "last" and "decode" in self.modes
        if skips and tokens > 1 and self.choose(position, tokens - 1) == mode:
            tokens -= 1
        return mode, min(tokens, self.modes[mode].tokens)

    def choose(self, position: int, tokens: int, held: bool = False) -> Mode:
        """The mode of the narrowest function that takes all tokens, else of the widest that they
        fill.

        A call may be padded if its contract keeps padding out of the cache. A `held` call may
        always be padded: the host writes only its accepted columns.
        """
        room, free = self.room(position), self.context - position
        widths = sorted(
            (chosen.tokens, mode) for mode, chosen in self.modes.items() if chosen.tokens <= room
        )
        for width, mode in widths:
            padded = (held or self._pads(width)) and width <= free
            if width == tokens or (width > tokens and padded):
                return mode
        filled = [mode for width, mode in widths if width <= tokens]
        if not filled:
            raise CetaneError(
                f"no function takes {tokens} tokens; widths: {[width for width, _ in widths]}"
            )
        return filled[-1]

    def check_room(self, position: int, tokens: int) -> None:
        """Raise CetaneError if the context has no room for `tokens` tokens at a position."""
        if position + tokens > self.context:
            raise CetaneError(
                f"{tokens} tokens after {position} do not fit a context of {self.context}",
                "port with a larger cache.context",
            )

    def widths(self, position: int) -> list[int]:
        """Tokens per call of the functions that fit the rest of the context, ascending."""
        free = min(self.room(position), self.context - position)
        return sorted({mode.tokens for mode in self.modes.values() if mode.tokens <= free})

    def room(self, position: int) -> int:
        """The largest number of columns that one call can write at a position."""
        rooms = [room(group, position) for group in self.groups]
        return min((r for r in rooms if r is not None), default=self.context)

    def _pads(self, width: int) -> bool:
        """Whether a call of this width may hold fewer tokens."""
        return all(group.pads(width) for group in self.groups)


def adapted(capacity: CapacityPlan) -> dict[str | None, Mapping[Mode, ModePlan]]:
    """The modes of a capacity, by adapter; None for the base alone."""
    modes: dict[str | None, Mapping[Mode, ModePlan]] = {None: capacity.modes}
    return modes | {name: own for name, own in capacity.adapters.items()}


def no_trees(plan: Plan) -> str | None:
    """The reason why a call of this plan cannot hold a tree of tokens; None if it can.

    A tree's columns are not in the order of the text, so the host must choose those that it keeps.
    """
    for name, group in plan.caches.items():
        if group.in_state:
            return f"its graphs write the state {name}, whose columns the host cannot move"
    for function in plan.functions.values():
        for item in function.inputs:
            if isinstance(item.source, FromHistory | FromMatrix):
                return f"{item.source.name} takes all columns of a call as a line of text"
    return None


def by_shard(steps: Sequence[Step | Route]) -> Steps:
    """The steps of each shard, in their order."""
    shards: defaultdict[str, list[Step | Route]] = defaultdict(list)
    for step in steps:
        shards[step.shard].append(step)
    return dict(shards)


def skips(plan: Plan, mode: ModePlan) -> bool:
    """Whether the silent calls of a mode skip a layer."""
    return not {step for step in mode.steps if not is_head(plan, step)} <= set(mode.silent)


def is_head(plan: Plan, step: Step | Route) -> bool:
    """Whether a step computes only logits."""
    if isinstance(step, Route):
        return False
    function = plan.functions[step.shard, step.function]
    only = all(isinstance(output.sink, ToLogits | ToChoice) for output in function.outputs)
    return only and not function.states


def room(group: Slots, position: int) -> int | None:
    """The number of columns that a call can write at a position; None if there is no limit.

    A call writes consecutive slots of a window's state, so it must end before the last slot.
    """
    if not group.forgets or group.contract != "stateful":
        return None
    return group.count - group.of(position)
