"""Drafts from a network's own logits: a draft head's, or the model's."""

from collections.abc import Iterable

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import line
from cetane.engine.sampling import largest, softmax
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.drafter import Drafter

LEVELS = 4
"""The number of kinds of a network's drafts. A kind is a range of the chance that it gives to the
first token."""
UNLIKELY = 0.4
"""A network drafts no further when the chance of its line of best tokens, by its own logits, falls
below this."""


class NetworkDrafter(Drafter):
    """Drafts the likeliest tokens of a network's logits.

    A draft's kind tells how sure the network is of its first token, so the controller learns when
    to trust it.
    """

    costly = True
    vocabulary: Array
    """The token of each of the logits, int `(R,)`."""

    def __init__(self) -> None:
        super().__init__()
        self.unlikely = UNLIKELY
        self.read_rows = 0
        """Rows of logits that the last draft took."""

    def made(self, draft: Draft) -> int:
        return self.read_rows

    def likely(self, rows: Iterable[Array], most: int) -> Draft:
        """The likeliest tokens after the text, at most `most`, from rows of logits `(R,)`.

        Each row is for the token after the best one of the row before. A tree holds second-best
        tokens too. Rows end where no token of the next row could be among the likeliest. They
        also end where the line of best tokens is unlikely, where its last token ends the answer, or
        where a row holds NaN.
        """
        found: list[tuple[float, int, int]] = []  # a token's chance, the one before it, its id
        kind, chance, last = "", 1.0, -1
        self.read_rows = 0
        for logits in rows:
            self.read_rows += 1
            best = largest(logits, most if self.trees else 1)
            shares = softmax(logits)[best]
            if not np.isfinite(shares[0]):
                break
            kind = kind or f"{self.name}-{min(int(shares[0] * LEVELS), LEVELS - 1)}"
            tokens = self.vocabulary[best].tolist()
            made = [(chance * s, last, t) for s, t in zip(shares.tolist(), tokens, strict=True)]
            found, last = found + [one for one in made if one[2] not in self.stop], len(found)
            if tokens[0] in self.stop:
                break
            chance = made[0][0]
            rivals = sum(other >= chance for other, _, _ in found)
            if rivals >= most or chance < self.unlikely:
                break
        if not found:
            return NO_DRAFT
        taken = sorted(range(len(found)), key=lambda number: -found[number][0])[:most]
        places = {-1: -1} | {number: place for place, number in enumerate(taken)}
        branches = tuple(places[found[number][1]] for number in taken)
        return Draft(
            tuple(found[number][2] for number in taken), kind,
            branches=None if list(branches) == list(line(len(taken))) else branches,
        )  # fmt: skip
