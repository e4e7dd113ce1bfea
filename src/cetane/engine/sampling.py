"""Sampling: the choice of the next token from logits."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cetane.engine.backend import Array
from cetane.errors import CetaneError

MOST_HEAT = sys.float_info.max
"""The largest temperature. Minus infinity divided by an infinite one would be NaN."""
TOP_P_SORTED = 256
"""How many of the likeliest tokens `top_p` sorts first. They nearly always sum to it."""


class Constraint(Protocol):
    """A rule for an answer's tokens, such as a grammar."""

    def allowed(self) -> Array:
        """Whether each token may come next, bool `(V,)`."""

    def keep(self, token: int) -> None:
        """Called with every token of the answer."""


@dataclass
class Sampler:
    """Chooses greedily at temperature 0, else samples from the truncated distribution.

    First the controls change the logits: penalties, bias, constraint. Then filters apply in
    transformers' order: temperature, top-k, top-p, min-p. `keep` tells a sampler the tokens of its
    answer, which penalties and constraints depend on.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the answer holds the token."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    constraint: Constraint | None = None
    kept: Counter[int] = field(init=False, repr=False, default_factory=Counter)
    """The tokens of the answer so far."""
    random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, MOST_HEAT),
            ("top-k", self.top_k, 0, float("inf")),
            ("top-p", self.top_p, 0.0, 1.0),
            ("min-p", self.min_p, 0.0, 1.0),
            ("seed", self.seed or 0, 0, float("inf")),
            ("presence penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency penalty", self.frequency_penalty, -2.0, 2.0),
        ):
            if not low <= value <= high:
                bounded = high < MOST_HEAT
                words = f"between {low} and {high}" if bounded else f"finite, at least {low}"
                raise CetaneError(f"{name} = {value}: must be {words}")
        for token, bias in self.logit_bias.items():
            if not bias < np.inf:  # minus infinity forbids a token
                raise CetaneError(f"logit bias of token {token} = {bias}: must be finite or -inf")
        self.random = np.random.default_rng(self.seed)

    @property
    def plain(self) -> bool:
        """Whether the choice is the likeliest token of the model's own logits."""
        controls = (self.presence_penalty, self.frequency_penalty, self.logit_bias, self.constraint)
        return self.temperature == 0 and not any(controls)

    def __call__(self, logits: Array) -> int:
        """The next token for logits `(V,)`."""
        if self.temperature == 0:
            check_finite(logits)
            return int(np.argmax(self.controlled(logits)))
        probabilities = self.probabilities(logits)
        return int(self.random.choice(len(probabilities), p=probabilities))

    def keep(self, token: int) -> None:
        """Count a token as one of the answer."""
        self.kept[token] += 1
        if self.constraint is not None:
            self.constraint.keep(token)

    def controlled(self, logits: Array) -> Array:
        """Logits `(V,)` after penalties, bias and constraint; the same array if there are none."""
        penalised = self.kept and (self.presence_penalty or self.frequency_penalty)
        if not (penalised or self.logit_bias or self.constraint):
            return logits
        changed: Array = logits.copy()
        if penalised:
            tokens, counts = np.array([*self.kept]), np.array([*self.kept.values()])
            changed[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        if self.logit_bias:
            tokens, biases = np.array([*self.logit_bias]), np.array([*self.logit_bias.values()])
            for token in tokens[(tokens < 0) | (tokens >= len(changed))]:
                raise CetaneError(f"logit bias: token {token} is not in the vocabulary")
            changed[tokens] += biases.astype(changed.dtype)
        if self.constraint is not None:
            changed[~self.constraint.allowed()] = -np.inf
            if not np.isfinite(changed.max()):
                raise CetaneError("the grammar allows no token that the model can choose")
        return changed

    def probabilities(self, logits: Array) -> Array:
        """The distribution from which a token is drawn, float64 `(V,)`."""
        check_finite(logits)
        scores = self.controlled(logits).astype(np.float64)
        with np.errstate(over="ignore"):  # at a tiny temperature: minus infinity is right
            scores = (scores - scores.max()) / self.temperature
        if 0 < self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        if self.top_p < 1:
            scores[~nucleus(softmax(scores), self.top_p)] = -np.inf
        if self.min_p > 0:
            probabilities = softmax(scores)
            scores[probabilities < self.min_p * probabilities.max()] = -np.inf
        return softmax(scores)


def check_finite(logits: Array) -> None:
    """Raise CetaneError for logits with NaN or infinity, from which nothing can be chosen."""
    highest = logits.max()  # NaN if any is
    if not np.isfinite(highest):
        raise CetaneError(
            f"the logits hold {'NaN' if np.isnan(highest) else 'infinity'}",
            "cetane validate BUNDLE names the op from which it comes",
        )


def largest(scores: Array, count: int) -> Array:
    """The places of the `count` largest of scores `(V,)`, the largest first; of equals, the
    first."""
    if count <= 1:
        return np.array([scores.argmax()][:count], dtype=np.intp)
    place = min(count, len(scores)) - 1
    last = -np.partition(-scores, place)[place]
    some = np.flatnonzero(~(scores < last))  # NaN too, so that there is always an answer
    ordered: Array = some[np.lexsort((some, -scores[some]))][:count]
    return ordered


def nucleus(probabilities: Array, least: float) -> Array:
    """Whether each token is one of the likeliest that sum to `least`, bool `(V,)`.

    The likeliest token always is. Of equally likely tokens, the lower id comes first.
    """
    count = TOP_P_SORTED
    while True:
        order = largest(probabilities, count)
        sums = np.cumsum(probabilities[order])
        if sums[-1] >= least or len(order) == len(probabilities):
            break
        count *= 8  # to sort all tokens takes longer than a small model's step
    kept = np.zeros(len(probabilities), bool)
    kept[order[: 1 + np.searchsorted(sums, least)]] = True
    return kept


def softmax(scores: Array) -> Array:
    """Softmax over the last axis, in the precision of `scores`."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
