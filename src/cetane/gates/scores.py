"""Scores of the shards' outputs and of logits, against the truth."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from cetane.engine.backend import Array
from cetane.families import Truth
from cetane.gates import metrics
from cetane.gates.reference import Observed
from cetane.planner import Planner
from cetane.schema.recipe import Mode
from cetane.validation import Data


class ShardScore(Data):
    """The score of a shard's output against its truth, over all probes."""

    shard: str
    tensor: str
    truth: str
    """Path of the Hugging Face module."""
    mode: Mode
    cosine: float
    """The smallest of the probes' means over tokens."""
    cosine_min: float
    """The smallest cosine of any token."""
    psnr: float
    by_position: tuple[float, ...] = ()
    """The probes' smallest cosine at every position, to 7 decimals: fp16 errs by some 1e-6."""


class LogitScore(Data):
    """The score of logits against the truth, over all tokens of all probes.

    Only the head's own tokens count. The port and the choice of tokens are judged separately:
    `best` is the share of positions whose best token the head has, and `top1` and `top5` count only
    there. So the share of agreement on all positions is `top1 * best`.
    """

    mode: Mode
    cosine: float
    cosine_min: float
    psnr: float
    kl: float
    kl_max: float
    top1: float
    top5: float
    best: float = 1.0
    absent: float = 0.0
    """The truth's mean probability for tokens that the head lacks."""


def shard_scores(
    planner: Planner, mode: Mode, seen: Sequence[Observed], truths: Sequence[Observed]
) -> Iterator[ShardScore]:
    """The scores of all shards' outputs in a mode."""
    for step, outputs in planner.truths(mode).items():
        for name, truth in outputs.items():
            if all(truth in observed.tensors for observed in seen):
                pairs = [
                    (a.tensors[truth], b.tensors[truth]) for a, b in zip(seen, truths, strict=True)
                ]
                yield shard_score(step.shard, name.removesuffix("_out"), truth, mode, pairs)


def shard_score(
    shard: str, tensor: str, truth: Truth, mode: Mode, pairs: list[tuple[Array, Array]]
) -> ShardScore:
    """The score of a tensor over the probes, pairs of `(n, C)`: the port's, and the truth."""
    cosines = [metrics.cosine(a, b) for a, b in pairs]
    return ShardScore(
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=mode,
        cosine=float(min(c.mean() for c in cosines)),
        cosine_min=float(min(c.min() for c in cosines)),
        psnr=float(min(metrics.psnr(a, b).mean() for a, b in pairs)),
        by_position=tuple(
            round(float(min(row)), 7) for row in zip_longest(*cosines, fillvalue=1.0)
        ),
    )


def logit_score(
    mode: Mode, seen: Sequence[Observed], truths: Sequence[Observed], tokens: Array
) -> LogitScore:
    """The score in a mode, of a head that has these tokens."""
    ours = np.concatenate([own.logits for own in seen])
    theirs = np.concatenate([truth.logits for truth in truths])
    has = np.isin(theirs.argmax(1), tokens)
    top1, top5 = (metrics.contains_top(ours[has], theirs[has], k) for k in (1, 5))
    kept = np.exp(metrics.log_softmax(theirs)[:, tokens]).sum(1)
    ours, theirs = ours[:, tokens], theirs[:, tokens]
    kl, cosines = metrics.divergence(ours, theirs), metrics.cosine(ours, theirs)
    return LogitScore(
        mode=mode,
        cosine=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        psnr=float(metrics.psnr(ours, theirs).mean()),
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(top1.mean()) if has.any() else 0.0,
        top5=float(top5.mean()) if has.any() else 0.0,
        best=float(has.mean()),
        absent=max(0.0, float(1 - kept.mean())),
    )
