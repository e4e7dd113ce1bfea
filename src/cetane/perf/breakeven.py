"""When speculation pays: drafted tokens, acceptance, and what a verifying call takes.

A verifier of K columns checks the last token and K - 1 drafted ones in one call, and its own next
token comes for free. Speculation pays where tokens a call / time of a call exceeds 1 / t1.
"""

from dataclasses import dataclass

from cetane.errors import CetaneError


@dataclass(frozen=True)
class DraftingTimes:
    """What steps with and without drafts take, in milliseconds, predicted or measured."""

    t1: float
    """A plain decode step."""
    tk: float
    """A verifying call, with all of its heads."""
    width: int
    """K: columns of the verifying call, of which K - 1 are drafted."""
    draft: float = 0
    """Drafting K - 1 tokens, and what else the host does for a call."""

    def __post_init__(self) -> None:
        if self.width < 2 or not (self.t1 > 0 and self.tk > 0 and self.draft >= 0):
            raise CetaneError(
                f"speculation of {self.width} columns, t1 = {self.t1} ms, tK = {self.tk} ms, "
                f"drafting {self.draft} ms: times must be positive, and columns 2 at least"
            )

    @property
    def slowdown(self) -> float:
        """A call with its drafting, in decode steps: the tokens a call that pay for it."""
        return (self.tk + self.draft) / self.t1

    @property
    def feasible(self) -> bool:
        """Whether any acceptance pays: K tokens is the most that a call gives."""
        return self.slowdown < self.width

    @property
    def ceiling(self) -> float:
        """The speed-up if every draft were accepted."""
        return self.width / self.slowdown

    def break_even_share(self) -> float | None:
        """Accepted / drafted tokens at which speculation starts to pay, (tK/t1 - 1) / (K - 1);
        None if none does."""
        return max(0.0, (self.slowdown - 1) / (self.width - 1)) if self.feasible else None

    def break_even_chance(self) -> float | None:
        """The chance that a drafted token is right, given that those before it are, at which
        speculation starts to pay; None if none does."""
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

    def speedup(self, chance: float) -> float:
        """Against plain decoding, if every drafted token is right with this chance."""
        return tokens_per_call(chance, self.width) / self.slowdown


def tokens_per_call(chance: float, width: int) -> float:
    """Expected tokens of a call: 1 + a + a^2 + ... + a^(K-1), since the first refusal ends it."""
    if not 0 <= chance <= 1:
        raise CetaneError(f"an acceptance of {chance}: it lies between 0 and 1")
    return sum(chance**accepted for accepted in range(width))


def per_slot_formula(t1: float, tk: float, width: int) -> float:
    """What ane-book's experiments 34 and 35 call break-even: 1 - t1 / (tK / K).

    It compares a plain step with a K-th of the call and says nothing of acceptance: it is 0 where
    the call costs K steps, where in truth every single draft must be accepted, and small where a
    verifier is hopeless.
    """
    return 1 - t1 / (tk / width)
