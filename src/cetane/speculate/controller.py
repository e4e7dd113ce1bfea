"""The controller: decides at each step whether to verify a draft, and how long it may be.

A call of width w that gives g tokens wins if g plain steps take longer: g * t1 > t(w). The
controller measures both times as the text grows. From accepted drafts it learns the chance of every
further token.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cetane.engine.session import Session

SLOWEST = 0.97
"""The lowest allowed speed of a generation, relative to plain decoding, if no draft is accepted."""
PRIOR, PRIOR_WEIGHT = 0.6, 2.0
"""The chance of a drafted token before any observation, and its weight in observations."""
DECAY = 0.95
"""The factor on an observation's weight with every later one, since texts change."""
LEARNING = 0.01
"""The share of plain time that drafts may cost if they are tried only to learn."""
RECENT = 15
"""The number of measurements in a median."""


class Cost:
    """A cost in seconds: the median of recent measurements, which one outlier does not move."""

    def __init__(self, *seconds: float) -> None:
        self.recent: deque[float] = deque(seconds, maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self.recent.append(seconds)

    @property
    def seconds(self) -> float:
        return median(self.recent) if self.recent else 0.0


@dataclass
class Record:
    """The accepted tokens of drafts of one kind."""

    reached: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    passed: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """The judged and the accepted tokens, by their place in the draft. Older drafts weigh less."""
    skips: int = 0
    """The number of drafts without verification since the last verified one."""

    def expected(self, drafted: int) -> float:
        """The expected number of tokens from a call with `drafted` drafted tokens."""
        total = chance = 1.0
        before, weight = PRIOR, PRIOR_WEIGHT
        for place in range(drafted):
            rate = (self.passed[place] + before * weight) / (self.reached[place] + weight)
            chance *= rate
            total += chance
            before = rate
        return total

    def observe(self, drafted: int, accepted: int) -> None:
        for place in self.reached:  # all places, so that a bad one is tried again in time
            self.reached[place] *= DECAY
            self.passed[place] *= DECAY
        for place in range(min(accepted + 1, drafted)):
            self.reached[place] += 1
            self.passed[place] += place < accepted


class Controller:
    """Keeps costs and records between generations, and an account of each generation.

    A step without a draft is a plain step. A draft is verified if it is expected to pay. Sometimes
    a draft is verified only to learn whether its kind pays by now. In both cases the generation
    must stay above `SLOWEST` even if the target refuses the whole draft.
    """

    def __init__(self, costs: Mapping[int, Sequence[float]]) -> None:
        """`costs`: measured seconds of calls, by width; width 1 is the plain step."""
        self.costs = {width: Cost(*seconds) for width, seconds in costs.items()}
        self.drafting: defaultdict[str, Cost] = defaultdict(Cost)
        """The cost of one drafted token, by drafter."""
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.begin()

    def begin(self) -> None:
        """Start the account of a generation."""
        self.plain = self.spent = 0.0
        """Seconds of this generation: those without drafts, and those in fact."""

    @property
    def plain_step(self) -> float:
        return self.costs[1].seconds

    def width(self, tokens: int) -> int | None:
        """The width of the narrowest call that takes `tokens` tokens; None if there is none."""
        return min((w for w in self.costs if w >= tokens), default=None)

    def gain(self, kind: str, drafted: int, proposing: float) -> float:
        """The expected speed of a step with `drafted` drafted tokens, relative to plain decoding.

        The drafter takes `proposing` seconds.
        """
        width = self.width(1 + drafted)
        if width is None:
            return 0.0
        cost = self.costs[width].seconds + proposing
        return self.records[kind].expected(drafted) * self.plain_step / cost

    def length(self, kind: str, most: int, proposing: float = 0.0) -> int:
        """The number of tokens to draft, 0 to `most`; drafting one takes `proposing` seconds."""
        gains = {
            count: self.gain(kind, count, proposing * count)
            for count in range(1, most + 1)
            if self.affordable(count, proposing * count)
        }
        best = max(gains, key=gains.__getitem__, default=0)
        if not best or gains[best] > 1:
            return best
        record = self.records[kind]
        loss = record.expected(best) * (1 / gains[best] - 1)  # in plain steps
        return best if LEARNING * record.skips >= loss else 0

    def affordable(self, drafted: int, proposing: float) -> bool:
        """Whether a draft pays if it is fully accepted, and keeps to `SLOWEST` if it is refused."""
        width = self.width(1 + drafted)
        if width is None:
            return False
        cost = self.costs[width].seconds + proposing
        could = cost < (1 + drafted) * self.plain_step
        return could and (self.spent + cost) * SLOWEST <= self.plain + self.plain_step

    def skip(self, kind: str) -> None:
        """Record that a draft of this kind was not verified."""
        self.records[kind].skips += 1

    def settle(
        self, kind: str, drafted: int, accepted: int, seconds: float, proposing: float = 0.0
    ) -> None:
        """Record a call of `seconds`, after `proposing` seconds of drafting. The target accepted
        `accepted` of its `drafted` tokens."""
        width = self.width(1 + drafted)
        assert width is not None
        self.costs[width].add(seconds)
        self.spent += self.costs[width].seconds + proposing
        self.plain += (1 + accepted) * self.plain_step
        if drafted:
            record = self.records[kind]
            record.observe(drafted, accepted)
            record.skips = 0

    def proposed(self, drafter: str, drafted: int, seconds: float) -> None:
        """Record that a drafter took `seconds` to draft `drafted` tokens."""
        self.drafting[drafter].add(seconds / max(1, drafted))

    def break_even(self, drafted: int) -> float | None:
        """The share of k drafted tokens that must be accepted for a draft to pay.

        From measured times it is (t(w) / t1 - 1) / k. Above 1, no draft can pay.
        """
        width = self.width(1 + drafted)
        if width is None or not drafted:
            return None
        return (self.costs[width].seconds / self.plain_step - 1) / drafted


def measure(session: Session, widest: int, rounds: int = 3) -> dict[int, list[float]]:
    """Seconds of `rounds` calls of every width, up to the narrowest that takes `widest` tokens.

    `session` must be new; its calls are evaluated and never accepted. One uncounted call of each
    width comes first.
    """
    widths = session.widths
    needed = min((w for w in widths if w >= widest), default=max(widths))
    times: dict[int, list[float]] = {w: [] for w in widths if w <= needed}
    for count in range(1 + rounds):
        for width, seconds in times.items():
            started = time.perf_counter()
            session.evaluate([token % session.plan.vocab for token in range(width)])
            if count:
                seconds.append(time.perf_counter() - started)
    return times
