"""Distances between two tensors, or two distributions. A row is a token; float64 inside."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
BLOCK = 1 << 22
"""The elements that are in float64 at a time: all logits of a large vocabulary take gigabytes."""


def blocks(count: int, width: int) -> list[slice]:
    """Rows `(count, width)` in pieces of at most `BLOCK` elements."""
    step = max(1, BLOCK // max(width, 1))
    return [slice(start, start + step) for start in range(0, count, step)]


def by_blocks(measure: Callable[..., Rows]) -> Callable[..., Rows]:
    """Let a measure of one or two tensors `(n, C)` take only some rows at a time."""

    @wraps(measure)
    def measured(*tensors: Rows) -> Rows:
        pieces = blocks(*tensors[0].shape)
        if len(pieces) < 2:
            return measure(*tensors)
        return np.concatenate([measure(*(t[rows] for t in tensors)) for rows in pieces])

    return measured


@by_blocks
def cosine(a: Rows, b: Rows) -> Rows:
    """The cosine of each row of `a (n, C)` with the row of `b`; 0 if one is zero or not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    usable = (norms > 0) & np.isfinite(norms)
    with np.errstate(invalid="ignore"):
        return np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=usable)


@by_blocks
def relative(a: Rows, b: Rows) -> Rows:
    """The norm of each row's difference `a - b (n, C)`, over the norm of `b`'s row; infinite if `a`
    is not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf)


@by_blocks
def largest(a: Rows, b: Rows) -> Rows:
    """The largest difference in each row of `a - b (n, C)`, over the root mean square of `b`'s row;
    infinite if `a` is not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.maximum(np.sqrt(np.square(b).mean(axis=1)), 1e-30)
        errors = np.abs(a - b).max(axis=1) / size
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf)


@by_blocks
def margins(logits: Rows) -> Rows:
    """The distance from the best logit of each row to the next, in nats."""
    best = np.partition(logits.astype(np.float64), -2, axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


@by_blocks
def psnr(a: Rows, b: Rows) -> Rows:
    """The peak signal-to-noise ratio of each row of `a (n, C)` against the row of `b`, in dB.

    The peak is the largest square in the row of `b`. Equal rows give infinity."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    noise = np.nan_to_num(np.square(a - b).mean(axis=1), nan=np.inf, posinf=np.inf)
    peak = np.square(b).max(axis=1)
    with np.errstate(divide="ignore"):
        return 10 * np.log10(np.divide(peak, noise, out=np.full(len(a), np.inf), where=noise > 0))


def log_softmax(logits: Rows) -> Rows:
    """Log probabilities over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def with_missing(q: Rows, known: Rows, share: float) -> Rows:
    """Log probabilities `(n, V)` of a model that has only the tokens `known`.

    All other tokens together get the probability `share`, in equal parts. `q (n, V)` are log
    probabilities over the known tokens.
    """
    others = q.shape[1] - len(known)
    if not others:
        return q
    full = np.full_like(q, np.log(share / others))
    full[:, known] = q[:, known] + np.log1p(-share)
    return full


def losses(q: Rows, targets: Rows) -> Rows:
    """Negative log probabilities `(n,)` of the targets `(n,)`, by log probabilities `q (n, V)`."""
    log_probabilities: Rows = np.take_along_axis(q, targets[:, None], axis=1)[:, 0]
    return -log_probabilities


WORST = 1e9
"""The largest figure that is written: JSON has no infinity, and larger ones tell no more."""


def written(figure: float, undefined: float = WORST) -> float:
    """A figure as it is written, at most `WORST` from 0; `undefined` for NaN."""
    return float(np.clip(undefined if np.isnan(figure) else figure, -WORST, WORST))


def perplexity(losses: Sequence[Rows]) -> float:
    """The perplexity from losses in nats, of a text or a window each. NaN for none, at most
    `WORST`."""
    together = np.concatenate(losses)
    if not together.size:
        return float("nan")
    mean = np.nan_to_num(together.mean(), nan=np.inf)
    return float(np.exp(min(mean, np.log(WORST))))


@by_blocks
def divergence(logits: Rows, reference: Rows) -> Rows:
    """KL(reference || logits) of each row, in nats."""
    return kl(log_softmax(logits), log_softmax(reference))


def kl(q: Rows, p: Rows) -> Rows:
    """KL(p || q) of each row of log probabilities `(n, V)`, in nats. A token of no probability in
    `p`, such as one that its head lacks, adds nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.exp(p) * (p - q)
    terms[p == -np.inf] = 0
    return terms.sum(axis=1)


def contains_top(logits: Rows, reference: Rows, k: int) -> Rows:
    """Whether the reference's best token is among the `k` best of each row `(n, V)`; not where its
    logit is NaN.

    Of equal logits the first is the best, as in greedy decoding. Else constant logits would always
    be right."""
    best = reference.argmax(axis=1)[:, None]
    scores = np.take_along_axis(logits, best, axis=1)
    before = np.arange(logits.shape[1]) < best
    return (~(logits <= scores) | (before & (logits == scores))).sum(axis=1) < k
