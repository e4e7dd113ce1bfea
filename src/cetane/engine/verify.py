"""Drafts, and how much of one counts: what is chosen has the target's distribution, exactly."""

from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.sampling import Sampler


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    tokens: tuple[int, ...] = ()
    kind: str = ""
    """Who proposed it, and from how much: acceptance is counted by kind."""
    distributions: Array | None = None
    """What every token was drawn from, `(len(tokens), V)`; None if it was not drawn at random."""

    def first(self, count: int) -> "Draft":
        """The draft without its tokens after `count`."""
        distributions = None if self.distributions is None else self.distributions[:count]
        return Draft(self.tokens[:count], self.kind, distributions)


NO_DRAFT = Draft()


def verify(rows: Array, draft: Draft, sampler: Sampler) -> list[int]:
    """The accepted tokens of a draft, then one more that the target chose itself.

    `rows` are the target's logits `(1 + len(draft.tokens), V)` for the token before the draft and
    those of the draft. Without a draft this is a plain step.
    """
    new: list[int] = []
    for index, token in enumerate(draft.tokens):
        drawn_from = None if draft.distributions is None else draft.distributions[index]
        new.append(choose(rows[index], token, drawn_from, sampler))
        if new[-1] != token:
            return new
    return [*new, sampler(rows[len(draft.tokens)])]


def choose(logits: Array, token: int, drawn_from: Array | None, sampler: Sampler) -> int:
    """The drafted token if it is accepted, else another one; either way drawn from the target's p.

    A token that was not drawn needs no rule of its own: draw from p, and see whether it is the
    same (it is with probability p(token), else one of the others in proportion). So a seed gives
    the same text with such drafts and without. One drawn from q is accepted with min(1, p/q), else
    the rest of p, max(0, p - q), is drawn from (arXiv 2211.17192, 2302.01318).
    """
    if drawn_from is None or sampler.temperature == 0:
        return sampler(logits)
    wanted = sampler.probabilities(logits)
    if sampler.random.random() * drawn_from[token] < wanted[token]:
        return token
    rest = np.maximum(wanted - drawn_from, 0)
    return int(sampler.random.choice(len(rest), p=rest / rest.sum()))
