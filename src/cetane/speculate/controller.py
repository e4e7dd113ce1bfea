"""Decides, step by step, whether a draft is worth a verifying call, and how long it may be.

A call of width w that gives g tokens wins when g plain steps take longer: g * t1 > t(w). Both times
are measured as it goes, and the chance of every further token is learned from what was accepted.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cetane.engine.session import Session

SLOWEST = 0.97
"""No generation is slower than this times plain, by measured times, however bad the drafts."""
PRIOR, PRIOR_WEIGHT = 0.6, 2.0
"""What a drafted token's chance is taken for before anything is known, in so many observations."""
DECAY = 0.95
"""How much an observation counts after the next one of its kind: texts change."""
LEARNING = 0.01
"""The share of plain time that may be lost on drafts of a kind that is not expected to pay."""
RECENT = 15


class Cost:
    """Seconds of something, as the median of what was measured lately: one outlier is nothing."""

    def __init__(self, *seconds: float) -> None:
        self.recent: deque[float] = deque(seconds, maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self.recent.append(seconds)

    @property
    def seconds(self) -> float:
        return median(self.recent) if self.recent else 0.0


@dataclass
class Record:
    """How drafts of one kind fared."""

    reached: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    passed: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """How often the token at a place of the draft was judged, and accepted; decayed."""
    skips: int = 0
    """Drafts that were not tried since the last that was."""

    def expected(self, drafted: int) -> float:
        """Tokens that a call with so many drafted tokens is expected to give."""
        total = chance = 1.0
        before, weight = PRIOR, PRIOR_WEIGHT
        for place in range(drafted):
            rate = (self.passed[place] + before * weight) / (self.reached[place] + weight)
            chance *= rate
            total += chance
            before = rate
        return total

    def observe(self, drafted: int, accepted: int) -> None:
        for place in self.reached:  # those not reached too: some day they are worth another try
            self.reached[place] *= DECAY
            self.passed[place] *= DECAY
        for place in range(min(accepted + 1, drafted)):
            self.reached[place] += 1
            self.passed[place] += place < accepted


class Controller:
    """Costs and records, kept from one generation to the next; the account starts anew with each.

    A step without a draft is a plain step. One with a draft is taken if it is expected to pay, or
    now and then to learn whether it would; in either case only if the generation would still be
    within `SLOWEST` should nothing of the draft be accepted.
    """

    def __init__(self, costs: Mapping[int, Sequence[float]]) -> None:
        """`costs`: seconds of calls by width; width 1 is the plain step."""
        self.costs = {width: Cost(*seconds) for width, seconds in costs.items()}
        self.drafting: defaultdict[str, Cost] = defaultdict(Cost)
        """Of proposing one token, by drafter."""
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.begin()

    def begin(self) -> None:
        """A generation starts."""
        self.plain = self.spent = 0.0
        """Seconds that its tokens would have taken, and took, by measured times."""

    @property
    def plain_step(self) -> float:
        return self.costs[1].seconds

    def width(self, tokens: int) -> int | None:
        """Width of the narrowest call for so many tokens; None if there is none."""
        return min((w for w in self.costs if w >= tokens), default=None)

    def gain(self, kind: str, drafted: int, proposing: float) -> float:
        """Expected speed relative to plain of a step with so many drafted tokens, which take
        `proposing` seconds to make."""
        width = self.width(1 + drafted)
        if width is None:
            return 0.0
        cost = self.costs[width].seconds + proposing
        return self.records[kind].expected(drafted) * self.plain_step / cost

    def length(self, kind: str, most: int, proposing: float = 0.0) -> int:
        """How many of at most `most` tokens to draft, each made in `proposing` seconds; 0: none."""
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
        """Whether the draft could pay if all of it is accepted, and the generation stays within
        `SLOWEST` if nothing is."""
        width = self.width(1 + drafted)
        if width is None:
            return False
        cost = self.costs[width].seconds + proposing
        could = cost < (1 + drafted) * self.plain_step
        return could and (self.spent + cost) * SLOWEST <= self.plain + self.plain_step

    def skip(self, kind: str) -> None:
        """A draft of this kind was not tried."""
        self.records[kind].skips += 1

    def settle(
        self, kind: str, drafted: int, accepted: int, seconds: float, proposing: float = 0.0
    ) -> None:
        """A call took `seconds`, after drafters took `proposing`; of its draft, if it had one, so
        many tokens were accepted."""
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
        """A drafter took so long to make a draft of so many tokens."""
        self.drafting[drafter].add(seconds / max(1, drafted))

    def break_even(self, drafted: int) -> float | None:
        """The share of drafted tokens that must be accepted: (t(w) / t1 - 1) / k, from times
        measured; above 1, no draft can pay."""
        width = self.width(1 + drafted)
        if width is None or not drafted:
            return None
        return (self.costs[width].seconds / self.plain_step - 1) / drafted


def measure(session: Session, widest: int, rounds: int = 3) -> dict[int, list[float]]:
    """Seconds of calls by width, up to the narrowest that takes `widest` tokens, on a new session:
    its calls are evaluated and forgotten. The first call of each width is not counted."""
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
