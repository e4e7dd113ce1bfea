"""The controller: decides at each step whether to verify a draft, and how long it may be.

A call of width w that gives g tokens wins if g plain steps take longer: g * t1 > t(w). The
controller measures both times as the text grows. From accepted drafts it learns the chance of every
further token.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cetane.engine.verify import Draft
from cetane.perf.breakeven import break_even_share
from cetane.speculate.drafter import DraftTimes
from cetane.speculate.timing import RecentMedian

SLOWEST = 0.97
"""The lowest allowed speed of a generation without a loan, relative to plain decoding, if no draft
is accepted."""
LENT = 2.0
"""The loan, in plain steps. A generation may fall behind `SLOWEST` by so many steps, but by no more
than the plain time of its tokens so far. Without it, a draft that costs two steps waits for some
thirty plain ones. Most answers of chat end before that."""
PRIOR, PRIOR_WEIGHT = 0.6, 2.0
"""The chance of a drafted token before any observation, and its weight in observations."""
DECAY = 0.95
"""The factor on an observation's weight with every later one, since texts change."""
LEARNING = 0.01
"""The share of plain time that drafts may cost if they are tried only to learn."""
SURPRISE = 3.0
"""A call is a surprise if its time differs from the expected one by more than this factor. The next
step is then plain, and tells whether the call or the machine has changed. With 1.5, the noise of a
shared machine cost chat a tenth."""
UNKNOWN = DraftTimes(asking=0.0, token=0.0)
"""The times of a drafter that has not measured its own."""


DraftPlace = tuple[int, int]
"""The depth of a drafted token below the text, and its rank among those after the same token."""


@lru_cache(maxsize=1024)
def places(parents: tuple[int, ...]) -> tuple[DraftPlace, ...]:
    """The depth and the rank of drafted tokens with these parents. Most drafts are short lines, so
    a few answers serve nearly all steps."""
    ranks: defaultdict[int, int] = defaultdict(int)
    result: list[DraftPlace] = []
    for parent in parents:
        result.append((result[parent][0] + 1 if parent >= 0 else 0, ranks[parent]))
        ranks[parent] += 1
    return tuple(result)


@dataclass
class Odds:
    """How often tokens of drafts of one kind are accepted, by their rank among the tokens after one
    token, and their depth below the text. Older drafts weigh less."""

    whole: "Odds | None" = None
    """The odds of all kinds of the drafter. A new kind is taken to be as good."""
    reached: defaultdict[DraftPlace, float] = field(default_factory=lambda: defaultdict(float))
    """The weight of drafted tokens whose predecessor was accepted, by place."""
    passed: defaultdict[DraftPlace, float] = field(default_factory=lambda: defaultdict(float))
    """The weight of the accepted ones among them."""
    skips: int = 0
    """The number of drafts without verification since the last verified one."""

    @property
    def prior(self) -> float:
        """The chance of a likeliest first token before any observation of this kind."""
        return PRIOR if self.whole is None else self.whole.rate((0, 0), PRIOR)

    def rate(self, place: DraftPlace, before: float) -> float:
        """The chance of a token whose predecessor is accepted. `before` is the chance without any
        observation."""
        passed, seen = self.passed.get(place, 0.0), self.reached.get(place, 0.0)
        return (passed + before * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)

    def chances(self, parents: Sequence[int]) -> list[float]:
        """For every drafted token with these parents, the chance that it and all tokens before it
        are accepted.

        A best token without observations takes the rate of the best token one level higher; at the
        first level, that of all kinds together. Every other token takes `PRIOR` of the chance that
        better ones after the same token leave.
        """
        prior = self.prior
        rates: dict[DraftPlace, float] = {}
        result: list[float] = []
        left: dict[int, float] = {}  # by parent
        for place, parent in zip(places(tuple(parents)), parents, strict=True):
            depth, rank = place
            before = rates.get((depth - 1, 0), prior) if not rank else PRIOR * left[parent]
            rates[place] = rate = min(self.rate(place, before), left.get(parent, 1.0))
            left[parent] = left.get(parent, 1.0) - rate
            result.append(rate * (result[parent] if parent >= 0 else 1.0))
        return result

    def judge(self, draft: Draft, new: Sequence[int], verified: bool) -> None:
        """Count the right tokens of a draft; the text continued with `new`. If the draft was not
        verified, only its first tokens can be judged."""
        path = [-1, *draft.path(new)]
        if verified:  # all places, so that a bad one is tried again in time
            for place in self.reached:
                self.reached[place] *= DECAY
                self.passed[place] *= DECAY
            self.skips = 0
        known = zip(places(tuple(draft.parents)), draft.parents, strict=True)
        for number, (place, parent) in enumerate(known):
            if parent in path and place[0] < len(new):
                if not verified:
                    self.reached[place] *= DECAY
                    self.passed[place] *= DECAY
                self.reached[place] += 1
                self.passed[place] += number in path


class OddsByKind(dict[str, Odds]):
    """Odds by kind. Those of all kinds of a drafter have the drafter's name."""

    def __missing__(self, kind: str) -> Odds:
        drafter, _, own = kind.partition("-")
        made = self[kind] = Odds(self[drafter] if own else None)
        return made


class Controller:
    """Keeps times and odds between generations, and an account of each generation.

    A step without a draft is a plain step. A draft is verified if it is expected to pay. Sometimes
    a draft is verified only to learn whether its kind pays by now. In both cases the generation
    must stay above `SLOWEST`, but for its loan, even if the target refuses the whole draft.
    """

    def __init__(self, costs: Mapping[int, Sequence[float]]) -> None:
        """`costs`: measured seconds of calls, by width; width 1 is the plain step."""
        self.step = RecentMedian(*costs[1])
        """Seconds of a plain step: of those made, and by the time of other calls."""
        self.surprise: tuple[int, float] | None = None
        """The width and the seconds of a call that awaits a plain step."""
        self.before: float | None = None
        """The seconds of the last step, if it was plain."""
        self.calls = {
            width: RecentMedian(*(second / self.plain_step for second in seconds))
            for width, seconds in costs.items()
        }
        """Calls of each width, in plain steps of their own time: other work on the machine slows
        both. In seconds, calls of a busy minute would look dear for ever after it."""
        self.in_seconds: dict[str, DraftTimes] = {}
        """The times that `take_times` got last, by drafter, in seconds. It takes over only new
        ones."""
        self.in_steps: dict[str, DraftTimes] = {}
        """The times of drafts, by drafter, in plain steps of the moment when they were measured. A
        drafter without known times has no entry."""
        self.lateness: defaultdict[str, RecentMedian] = defaultdict(lambda: RecentMedian(1.0))
        """The time that drafts took, divided by the time in `in_steps`, by drafter."""
        self.share: defaultdict[str, float] = defaultdict(lambda: 1.0)
        """By drafter: of the tokens asked for after the first, the share that it makes. Many drafts
        end early. Older drafts weigh less."""
        self.odds = OddsByKind()
        widths = sorted(self.calls)
        self.narrowest = [min(w for w in widths if w >= t) for t in range(1 + widths[-1])]
        """The width of the narrowest call, by the number of its tokens."""
        self.begin()

    def begin(self) -> None:
        """Start the account of a generation."""
        self.surprise = self.before = None  # their moment is over
        self.plain = self.spent = 0.0
        """Seconds of this generation: `plain` as if without drafts, `spent` with them."""

    @property
    def plain_step(self) -> float:
        return self.step.usual

    def seconds(self, width: int) -> float:
        """Seconds of a call of this width now."""
        return self.plain_step * self.calls[width].usual

    def take_times(self, drafter: str, times: DraftTimes) -> None:
        """Take over newly measured times of a drafter, in seconds at the current plain step."""
        if self.in_seconds.get(drafter) != times:
            self.in_seconds[drafter] = times
            self.in_steps[drafter] = times.scaled(1 / self.plain_step)

    def drafting_seconds(self, drafter: str, tokens: int) -> float:
        """Seconds of a draft for which `tokens` tokens are asked now, without the reading of unread
        ones. It is 0 for a drafter without known times, which measures them when it is asked."""
        times = self.in_steps.get(drafter, UNKNOWN)
        made = 1 + (tokens - 1) * self.share[drafter]
        return self.plain_step * times.draft(made, unread=0) * self.lateness[drafter].usual

    def reading_seconds(self, drafter: str, tokens: int) -> float:
        """Seconds in which a drafter reads `tokens` now; 0 where its times are not known."""
        times = self.in_steps.get(drafter, UNKNOWN)
        return self.plain_step * times.reading(tokens) * self.lateness[drafter].usual

    def width(self, tokens: int) -> int | None:
        """The width of the narrowest call that takes `tokens` tokens; None if there is none."""
        return self.narrowest[tokens] if tokens < len(self.narrowest) else None

    def gain(self, kind: str, parents: Sequence[int], proposing: float = 0.0) -> float:
        """The expected speed of a step with drafted tokens, relative to plain decoding.

        `parents` are those of a `Draft`. The drafter takes `proposing` seconds.
        """
        width = self.width(1 + len(parents))
        if width is None:
            return 0.0
        tokens = 1 + sum(self.odds[kind].chances(parents))
        return tokens * self.plain_step / (self.seconds(width) + proposing)

    def length(
        self, kind: str, parents: Sequence[int], drafter: str | None = None, unread: int = 0
    ) -> int:
        """How many of these tokens to draft, in their order, or to verify.

        With `drafter` they are not made yet, so the time of drafting counts too. The drafter
        first reads `unread` tokens. That time counts only in `affordable`, since later drafts need
        not read them again.
        """
        reading = 0.0 if drafter is None else self.reading_seconds(drafter, unread)
        odds, levels = self.odds[kind], [depth for depth, _ in places(tuple(parents))]
        tokens, deepest = 1.0, 0
        best, best_gain, best_tokens = 0, 0.0, 1.0
        for count, chance in enumerate(odds.chances(parents), 1):
            tokens, deepest = tokens + chance, max(deepest, levels[count - 1] + 1)
            width = self.width(1 + count)
            if width is None:
                break
            cost = self.seconds(width)
            if drafter is not None:
                cost += self.drafting_seconds(drafter, count)
            gain = tokens * self.plain_step / cost
            if gain > best_gain and self.affordable(cost, deepest, reading):
                best, best_gain, best_tokens = count, gain, tokens
        if not best or best_gain > 1:
            return best
        loss = best_tokens * (1 / best_gain - 1)  # in plain steps
        return best if LEARNING * odds.skips >= loss else 0

    def affordable(self, cost: float, most: int, reading: float = 0.0) -> bool:
        """Whether a step of `cost` seconds can pay and be risked, with the `reading` before it.

        It can pay if `most` accepted tokens are worth more. It can be risked if the generation
        keeps to `SLOWEST` and its loan when the target refuses all of them.
        """
        could = self.surprise is None and cost < (1 + most) * self.plain_step
        spent = self.spent + cost + reading
        lent = min(self.plain, LENT * self.plain_step)
        return could and spent * SLOWEST <= self.plain + self.plain_step + lent

    def solvent(self, most: int) -> bool:
        """Whether a draft of at most `most` tokens could be verified now, in any call."""
        widths = [width for width in self.calls if width > 1]
        return any(self.affordable(self.seconds(width), min(most, width - 1)) for width in widths)

    def skip(self, kind: str) -> None:
        """Record that a draft of this kind was not made, or not verified."""
        self.odds[kind].skips += 1

    def judge(self, draft: Draft, new: Sequence[int], verified: bool) -> None:
        """Learn from a proposal, after which the text continued with `new`. Without verification
        it still shows whether its first token was right.

        A drafter has odds of its own beside those of its kinds: before it is asked, nobody knows
        the kind of its draft.
        """
        for kind in {draft.kind, draft.drafter}:
            if not verified:
                self.skip(kind)
            self.odds[kind].judge(draft, new, verified)

    def settle(self, drafted: int, gained: int, seconds: float) -> None:
        """Record a call of `seconds`. With `drafted` drafted tokens, it gave `gained` tokens."""
        width = self.width(1 + drafted)
        assert width is not None
        if width == 1:
            self.step.add(seconds)
            if self.surprise is not None:
                late, took = self.surprise
                self.calls[late].add(took / seconds)
                self.surprise = None
        elif not 1 / SURPRISE <= seconds / self.seconds(width) <= SURPRISE:
            self.surprise = width, seconds
        elif self.before is not None:
            self.calls[width].add(seconds / self.before)
        else:  # steps become slower as the text grows, also where few are plain
            self.step.add(seconds / self.calls[width].usual)
        self.before = seconds if width == 1 else None
        self.spent += self.seconds(width)
        self.plain += gained * self.plain_step

    def proposed(
        self, drafter: str, asked: int, made: int, seconds: float, unread: int = 0
    ) -> None:
        """Record that a drafter of known times took `seconds` to make `made` tokens of the `asked`
        ones, after `unread` tokens that it had not read."""
        made = max(1, made)
        usual = self.in_steps[drafter].draft(made, unread)
        self.lateness[drafter].add(seconds / self.plain_step / usual)
        if asked > 1:
            share = (made - 1) / (asked - 1)
            self.share[drafter] += (1 - DECAY) * (share - self.share[drafter])

    def break_even(self, drafted: int) -> float | None:
        """The share of k drafted tokens that must be accepted for a draft to pay.

        It comes from measured times. Above 1, no draft can pay.
        """
        width = self.width(1 + drafted)
        if width is None or not drafted:
            return None
        return break_even_share(self.seconds(width) / self.plain_step, drafted)
