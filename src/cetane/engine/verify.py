"""Drafts, and the choice of their accepted tokens, which keeps the target's own distribution."""

from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.sampling import Sampler


@dataclass(frozen=True)
class Draft:
    """Proposed next tokens."""

    tokens: tuple[int, ...] = ()
    kind: str = ""
    """The drafter and the length of its match; acceptance is counted by kind."""
    distributions: Array | None = None
    """The distributions from which the tokens were drawn, `(len(tokens), V)`; None for a draft that
    was not drawn at random."""

    def first(self, count: int) -> "Draft":
        """The draft without its tokens after `count`."""
        distributions = None if self.distributions is None else self.distributions[:count]
        return Draft(self.tokens[:count], self.kind, distributions)


NO_DRAFT = Draft()


def verify(rows: Array, draft: Draft, sampler: Sampler) -> list[int]:
    """The accepted tokens of a draft, then one token that the target chooses itself.

    `rows` are the target's logits `(1 + len(draft.tokens), V)`, after the token before the draft
    and after each of its tokens. Without a draft this is a plain step. The sampler keeps
    all of them.
    """
    new: list[int] = []
    for index, token in enumerate(draft.tokens):
        drawn_from = None if draft.distributions is None else draft.distributions[index]
        new.append(choose(rows[index], token, drawn_from, sampler))
        sampler.keep(new[-1])
        if new[-1] != token:
            return new
    new.append(sampler(rows[len(draft.tokens)]))
    sampler.keep(new[-1])
    return new


def choose(logits: Array, token: int, drawn_from: Array | None, sampler: Sampler) -> int:
    """The drafted token if it is accepted, else another. The result has the target's distribution
    p.

    If the draft was not drawn at random, draw a token from p: the draft is accepted if both are the
    same. So a seed gives the same text with such drafts and without. A token drawn from q is
    accepted with probability min(1, p/q). Otherwise one is drawn from the rest of p, max(0, p - q)
    (arXiv 2211.17192, 2302.01318).
    """
    if drawn_from is None or sampler.temperature == 0:
        return sampler(logits)
    wanted = sampler.probabilities(logits)
    if sampler.random.random() * drawn_from[token] < wanted[token]:
        return token
    rest = np.maximum(wanted - drawn_from, 0)
    return int(sampler.random.choice(len(rest), p=rest / rest.sum()))
