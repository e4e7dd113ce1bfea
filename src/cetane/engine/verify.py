"""Drafts, and the choice of their accepted tokens, which keeps the target's own distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import line
from cetane.engine.sampling import Sampler


@dataclass(frozen=True)
class Draft:
    """Proposed next tokens: a line, or a tree in which several tokens may follow one."""

    tokens: tuple[int, ...] = ()
    """A token comes before all that follow it; tokens after the same token all differ."""
    kind: str = ""
    """The drafter, and after a dash the length of its match or how sure it is; acceptance is
    counted by kind."""
    distributions: Array | None = None
    """The distributions from which a line's tokens were drawn, `(len(tokens), V)`; None for tokens
    that were not drawn at random."""
    branches: tuple[int, ...] | None = None
    """The place of the token before each token of a tree; -1 is the last token of the text. None
    for a line."""

    @property
    def parents(self) -> Sequence[int]:
        """The place of the token before each token; -1 is the last token of the text."""
        return line(len(self.tokens)) if self.branches is None else self.branches

    @property
    def drafter(self) -> str:
        """The name of its drafter."""
        return self.kind.partition("-")[0]

    def first(self, count: int) -> "Draft":
        """The draft with its first `count` tokens only."""
        return Draft(
            self.tokens[:count], self.kind,
            None if self.distributions is None else self.distributions[:count],
            None if self.branches is None else self.branches[:count],
        )  # fmt: skip

    def path(self, new: Sequence[int]) -> list[int]:
        """The places of the drafted tokens that the text continues with, if `new` come next."""
        places: list[int] = []
        for token in new:
            place = self.after(places[-1] if places else -1, token)
            if place is None:
                break
            places.append(place)
        return places

    def after(self, parent: int, token: int) -> int | None:
        """The place of a token that follows the place `parent`; None if it is not drafted."""
        pairs = enumerate(zip(self.parents, self.tokens, strict=True))
        return next((place for place, pair in pairs if pair == (parent, token)), None)


NO_DRAFT = Draft()


def grafted(draft: Draft, other: Draft, most: int) -> Draft:
    """A tree of at most `most` tokens: those of a draft, and then what another draft adds.

    Drafts that were drawn at random cannot be part of a tree.
    """
    tokens, parents = list(draft.tokens), list(draft.parents)
    tree = {
        (parent, token): n for n, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    own = {-1: -1}  # the places in the tree of the other draft's tokens
    for number, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
        if (own[parent], token) not in tree:
            if len(tokens) == most:
                break
            tree[own[parent], token] = len(tokens)
            tokens.append(token)
            parents.append(own[parent])
        own[number] = tree[own[parent], token]
    return Draft(tuple(tokens), draft.kind, None, tuple(parents))


def verify(rows: Array, draft: Draft, sampler: Sampler) -> list[int]:
    """The accepted tokens of a draft, then one token that the target chooses itself.

    `rows` are the target's logits `(1 + len(draft.tokens), V)`, after the token before the draft
    and after each of its tokens. Without a draft this is a plain step. The sampler keeps every
    token of the result. For a draft that was not drawn at random, the target draws its own token
    from p. A drafted token is accepted if it is that one. So a seed gives one text, with such
    drafts and without.
    """
    new: list[int] = []
    place: int | None = -1
    while place is not None:
        logits, drawn_from = rows[place + 1], draft.distributions
        if drawn_from is None or place + 1 == len(draft.tokens):
            new.append(sampler(logits))
        else:
            new.append(choose(logits, draft.tokens[place + 1], drawn_from[place + 1], sampler))
        sampler.keep(new[-1])
        place = draft.after(place, new[-1])
    return new


def choose(logits: Array, token: int, drawn_from: Array, sampler: Sampler) -> int:
    """The drafted token if it is accepted, else another. The result has the target's distribution
    p.

    A token drawn from q, `drawn_from (V,)`, is accepted with probability min(1, p/q). Otherwise one
    is drawn from the rest of p, max(0, p - q) (arXiv 2211.17192, 2302.01318).
    """
    if sampler.temperature == 0:
        return sampler(logits)
    wanted = sampler.probabilities(logits)
    if sampler.random.random() * drawn_from[token] < wanted[token]:
        return token
    rest = np.maximum(wanted - drawn_from, 0)
    return int(sampler.random.choice(len(rest), p=rest / rest.sum()))
