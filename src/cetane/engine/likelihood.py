"""Likelihoods: log probabilities of given tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.execution import Watch
from cetane.engine.prefixes import Fed, Prefixes
from cetane.engine.sampling import check_finite, largest

LEAST = -9999.0
"""The log probability of a token that the head cannot choose, as OpenAI's API writes it."""


@dataclass(frozen=True)
class TokenLikelihood:
    """A token's log probability, in nats, among all tokens that could have come in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, in descending order."""

    @property
    def greedy(self) -> bool:
        """Whether no token was likelier; known if `top` is not empty."""
        return bool(self.top) and self.logprob == self.top[0][1]


def token_likelihood(logits: Array, token: int, top: int) -> TokenLikelihood:
    """The score of a token for the logits `(V,)`, with the `top` likeliest tokens.

    Computed in float64, from the model's own distribution: before any sampling control. Raises
    CetaneError for logits with NaN or infinity.
    """
    check_finite(logits)
    scores = logits.astype(np.float64)
    highest = scores.max()
    total = highest + np.log(np.exp(scores - highest).sum())

    def of(other: int) -> float:
        return max(float(scores[other] - total), LEAST)

    likeliest = largest(scores, top).tolist()
    return TokenLikelihood(token, of(token), tuple((other, of(other)) for other in likeliest))


def likelihoods(
    prefixes: Prefixes,
    tokens: Sequence[int],
    start: int = 1,
    top: int = 1,
    check: Callable[[], None] = lambda: None,
    adapter: str | None = None,
    watch: Sequence[Watch] = (),
) -> tuple[list[TokenLikelihood], Fed]:
    """The scores of all tokens from position `start` >= 1 on, and the session that holds them.

    `tokens` may be one more than the context holds, since nothing is predicted after the last one:
    then the session lacks it. Only one call's logits are in memory at a time. Tokens that a kept
    session holds are not computed again. The options are those of `Prefixes.feed`.
    """
    scores: list[TokenLikelihood] = []

    def rows(first: int, logits: Array) -> None:
        for offset, row in enumerate(logits):
            position = first + offset + 1  # a row predicts the token after its own
            if start <= position < len(tokens):
                scores.append(token_likelihood(row, tokens[position], top))

    read = tokens[:-1] if len(tokens) == prefixes.schedule.context + 1 else tokens
    fed = prefixes.feed(read, rows, start - 1, check, adapter, watch)
    return scores, fed
