"""Sampling: the choice of the next token from logits."""

from dataclasses import dataclass, field

import numpy as np

from cetane.engine.backend import Array
from cetane.errors import CetaneError


@dataclass
class Sampler:
    """Chooses greedily at temperature 0, else samples from the truncated distribution.

    Filters apply in transformers' order: temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, float("inf")),
            ("top-k", self.top_k, 0, float("inf")),
            ("top-p", self.top_p, 0.0, 1.0),
            ("min-p", self.min_p, 0.0, 1.0),
            ("seed", self.seed or 0, 0, float("inf")),
        ):
            if not low <= value <= high:
                raise CetaneError(f"{name} = {value}: must be between {low} and {high}")
        self.random = np.random.default_rng(self.seed)

    def __call__(self, logits: Array) -> int:
        """The next token for logits `(V,)`."""
        if self.temperature == 0:
            check(logits)
            return int(np.argmax(logits))
        probabilities = self.probabilities(logits)
        return int(self.random.choice(len(probabilities), p=probabilities))

    def probabilities(self, logits: Array) -> Array:
        """The distribution from which a token is drawn, float64 `(V,)`."""
        check(logits)
        scores = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # at a tiny temperature: minus infinity is right
            scores = (scores - scores.max()) / self.temperature
        if 0 < self.top_k < len(scores):
            scores[scores < np.partition(scores, -self.top_k)[-self.top_k]] = -np.inf
        if self.top_p < 1:
            order = np.argsort(-scores, kind="stable")
            before = np.cumsum(softmax(scores[order])) - softmax(scores[order])
            scores[order[1:][before[1:] >= self.top_p]] = -np.inf
        if self.min_p > 0:
            probabilities = softmax(scores)
            scores[probabilities < self.min_p * probabilities.max()] = -np.inf
        return softmax(scores)


def check(logits: Array) -> None:
    """Raise CetaneError for logits with NaN or infinity, from which nothing can be chosen."""
    highest = logits.max()  # NaN if any is
    if not np.isfinite(highest):
        raise CetaneError(f"the logits hold {'NaN' if np.isnan(highest) else 'infinity'}")


def softmax(scores: Array) -> Array:
    """Softmax over the last axis, in the precision of `scores`."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
