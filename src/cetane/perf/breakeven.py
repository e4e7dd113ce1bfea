"""The break-even of speculation, from drafted tokens, acceptance and the time of calls.

A verifier of K columns checks the last token and K - 1 drafted ones in one call; its own next token
comes free. Speculation pays if the tokens of a call, divided by its time, exceed 1 / t1.
"""

from dataclasses import dataclass
from math import inf

from cetane.errors import CetaneError

WIDEST = 1024
"""The most columns of a call: no recipe allows more tokens (`TokensSection`)."""


@dataclass(frozen=True)
class DraftingTimes:
    """The times of steps with and without drafts, in milliseconds, predicted or measured."""

    t1: float
    """A plain decode step."""
    tv: float
    """tK: a verifying call, with the whole head."""
    width: int
    """K: columns of the verifying call; K - 1 of them are drafted."""
    draft: float = 0
    """Drafting of K - 1 tokens, and the host's other work for a call."""

    def __post_init__(self) -> None:
        if not 2 <= self.width <= WIDEST:
            raise CetaneError(
                f"k = {self.width}: no number of tokens of a verifying call", f"2 to {WIDEST}"
            )
        for name, ms in (("t1", self.t1), ("tv", self.tv)):
            if not 0 < ms < inf:
                raise CetaneError(
                    f"{name} = {ms:g}: no time of a call", "give milliseconds above 0"
                )
        if not 0 <= self.draft < inf:
            raise CetaneError(f"draft = {self.draft:g}: no time", "give 0 ms or more")
        if not 0 < self.slowdown < inf:
            raise CetaneError(
                f"t1 = {self.t1:g} and tv = {self.tv:g}: no call takes so many plain steps",
                "give both in milliseconds",
            )

    @property
    def slowdown(self) -> float:
        """The time of a call with its drafting, in decode steps: the tokens that pay for it."""
        return (self.tv + self.draft) / self.t1

    @property
    def feasible(self) -> bool:
        """Whether any acceptance pays: a call gives at most K tokens."""
        return self.slowdown < self.width

    @property
    def ceiling(self) -> float:
        """The speed-up if every draft were accepted; at most K, since a call that is quicker than a
        step can decode without drafts too."""
        return self.width / max(1.0, self.slowdown)

    def break_even_share(self) -> float | None:
        """The share of accepted tokens at which speculation starts to pay, (tK/t1 - 1) / (K - 1).

        None if no share pays.
        """
        return break_even_share(self.slowdown, self.width - 1) if self.feasible else None

    def break_even_chance(self) -> float | None:
        """The chance of a right drafted token, after right ones, at which speculation starts to
        pay.

        None if no chance pays.
        """
        if not self.feasible:
            return None
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if tokens_per_call(middle, self.width) < self.slowdown:
                low = middle
            else:
                high = middle
        return high if self.slowdown > 1 else 0.0


def break_even_share(slowdown: float, drafted: int) -> float:
    """The share of drafted tokens that must be accepted for a call of so many plain steps to pay.
    Above 1, none pays."""
    return max(0.0, (slowdown - 1) / drafted)


def tokens_per_call(chance: float, width: int) -> float:
    """Expected tokens of a call: 1 + a + a^2 + ... + a^(K-1), since the first refusal ends it."""
    if not 0 <= chance <= 1:
        raise CetaneError(f"an acceptance of {chance}: must lie between 0 and 1")
    return sum(chance**accepted for accepted in range(width))


def per_slot_formula(t1: float, tv: float, width: int) -> float:
    """The figure that ane-book's experiments 34 and 35 call break-even: 1 - t1 / (tK / K).

    It compares a plain step with a K-th of the call, and ignores acceptance. It is 0 if the call
    costs K steps; in truth every draft must then be accepted. It is small for a hopeless verifier.
    """
    return 1 - t1 / (tv / width)
