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
    """The smallest of the probes' means over tokens, in dB."""
    by_position: tuple[float, ...] = ()
    """At every token's number, the smallest cosine of any probe, to 7 decimals: fp16 errs by some
    1e-6."""


class LogitScore(Data):
    """The score of logits against the truth, over all tokens of all probes.

    Only the head's own tokens count. `cosine`, `psnr` (dB) and `kl` (nats) are means over tokens.
    The port and the choice of the head's tokens have figures of their own. `best` is the share of
    positions whose best token the head has, and `top1` and `top5` count only these positions. So
    the share of agreement on all positions is `top1 * best`.
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
    """The scores of those shards' outputs in a mode that all probes have."""
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
    """The score of a tensor over all probes. A probe's pair is the port's tensor and the truth,
    both `(n, C)`."""
    cosines = [metrics.cosine(a, b) for a, b in pairs]
    return ShardScore(
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=mode,
        cosine=float(min(c.mean() for c in cosines)),
        cosine_min=float(min(c.min() for c in cosines)),
        psnr=min(mean_psnr(metrics.psnr(a, b)) for a, b in pairs),
        by_position=tuple(
            round(float(min(row)), 7) for row in zip_longest(*cosines, fillvalue=1.0)
        ),
    )


def logit_score(
    mode: Mode, seen: Sequence[Observed], truths: Sequence[Observed], tokens: "Array | slice"
) -> LogitScore:
    """The score of the logits in a mode, for a head that has these tokens."""
    parts = [
        logit_rows(own.logits[rows], truth.logits[rows], tokens)
        for own, truth in zip(seen, truths, strict=True)
        for rows in metrics.blocks(*truth.logits.shape)
    ]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    has = rows["best"]
    return LogitScore(
        mode=mode,
        cosine=float(rows["cosine"].mean()),
        cosine_min=float(rows["cosine"].min()),
        psnr=mean_psnr(rows["psnr"]),
        kl=metrics.written(rows["kl"].mean()),
        kl_max=metrics.written(rows["kl"].max()),
        top1=float(rows["top1"][has].mean()) if has.any() else 0.0,
        top5=float(rows["top5"][has].mean()) if has.any() else 0.0,
        best=float(has.mean()),
        absent=max(0.0, float(1 - rows["kept"].mean())),
    )


def mean_psnr(tokens: Array) -> float:
    """The mean of the tokens' PSNRs, as it is written. Tokens with all noise outweigh those
    without any: together their mean is NaN."""
    with np.errstate(invalid="ignore"):
        return metrics.written(tokens.mean(), undefined=-metrics.WORST)


def logit_rows(ours: Array, theirs: Array, tokens: "Array | slice") -> dict[str, Array]:
    """Every figure `(n,)` of some rows of logits `(n, V)`."""
    known = np.zeros(theirs.shape[1], bool)
    known[tokens] = True
    a, b = ours[:, tokens], theirs[:, tokens]
    return {
        "best": known[theirs.argmax(1)],
        "top1": metrics.contains_top(ours, theirs, 1),
        "top5": metrics.contains_top(ours, theirs, 5),
        "kept": np.exp(metrics.log_softmax(theirs)[:, tokens]).sum(1),
        "kl": metrics.divergence(a, b),
        "cosine": metrics.cosine(a, b),
        "psnr": metrics.psnr(a, b),
    }
