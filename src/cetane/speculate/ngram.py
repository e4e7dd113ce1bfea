"""Prompt lookup: what followed the last tokens when they occurred before in this sequence."""

from collections.abc import Sequence

from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.speculate.drafter import Drafter

LONGEST = 64
"""Tokens of a match: every length has a dictionary of its own."""


class Ngram(Drafter):
    """The longest suffix of `low` to `high` tokens that occurred before, at its last occurrence.

    One dictionary per length makes a proposal a few look-ups, whatever the length of the text.
    """

    name = "ngram"

    def __init__(self, low: int = 1, high: int = 8) -> None:
        if not 1 <= low <= high <= LONGEST:
            raise CetaneError(
                f"n-grams of {low} to {high} tokens: must be 1 <= least <= most <= {LONGEST}"
            )
        super().__init__()
        self.lengths = range(high, low - 1, -1)

    def forget(self) -> None:
        self.after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self.lengths}
        """Where the token after an n-gram stands, by length and n-gram."""

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            for length, after in self.after.items():
                if length <= at:
                    after[tuple(self.tokens[at - length :])] = at
            self.tokens.append(token)

    def propose(self, most: int) -> Draft:
        for length, after in self.after.items():
            if length <= len(self.tokens):
                start = after.get(tuple(self.tokens[-length:]))
                if start is not None:
                    return Draft(self.copy(start, most), f"{self.name}-{length}")
        return NO_DRAFT

    def copy(self, start: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `start` on; what runs past the end repeats itself."""
        source = self.tokens[start : start + count]
        period = len(self.tokens) - start
        return tuple(source[i % period] for i in range(count))
