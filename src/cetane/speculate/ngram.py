"""Prompt lookup: proposes the tokens that followed the same last tokens earlier in the sequence."""

from collections.abc import Sequence

from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.speculate.drafter import Drafter

LONGEST = 64
"""The most tokens of a match: the memory grows with the lengths, each of which has a dictionary."""


class Ngram(Drafter):
    """Copies from the last occurrence of the longest known suffix, of `low` to `high` tokens.

    With a dictionary for each length, a proposal takes a few look-ups, however long the text.
    """

    name = "ngram"

    def __init__(self, low: int = 1, high: int = 8) -> None:
        if not 1 <= low <= high <= LONGEST:
            raise CetaneError(
                f"n-grams of {low} to {high} tokens: need 1 <= least <= most <= {LONGEST}"
            )
        super().__init__()
        self.lengths = range(high, low - 1, -1)

    def forget(self) -> None:
        self.after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self.lengths}
        """The position of the token after each n-gram, by length and n-gram."""

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
        """`count` tokens from `start` on; beyond the end, they repeat."""
        source = self.tokens[start : start + count]
        period = len(self.tokens) - start
        return tuple(source[i % period] for i in range(count))


class PublishedNgram(Ngram):
    """The look-up of the published ZAYA port, with the defect that explains its figures.

    Its history holds the last token already, and it appends this token once more. So the last
    token seems to follow itself: without a longer match, one token is drafted again and again.
    Nothing asks whether a draft pays (ane-book, experiments 32 to 35).
    """

    name = "ngram-published"
    always = True

    def propose(self, most: int) -> Draft:
        seen = Ngram(self.lengths[-1], self.lengths[0])
        seen.forget()
        seen.extend([*self.tokens, *self.tokens[-1:]])
        return seen.propose(most)
