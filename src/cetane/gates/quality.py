"""Perplexity of a bundle on a text, beside the Hugging Face model's on the same tokens."""

from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.golden import thresholds
from cetane.gates.reference import Reference
from cetane.schema.recipe import Mode
from cetane.validation import Data


class Quality(Data):
    """Perplexities over the predicted tokens, and how the predictions agree.

    A head that lacks tokens would give a text with one of them no probability at all. It is judged
    as a model that says one of those with probability `missing`, each as likely; this share comes
    with the subset, from text that neither chose it nor judges it here. So perplexity, ratio and KL
    are over all tokens, and hold what the subset costs.
    """

    passed: bool
    fingerprint: str
    """Of the checkpoint that was compared with."""
    tokens: int
    perplexity: float
    reference_perplexity: float
    ratio: float
    limit: float
    """The most that the ratio may be."""
    kl: float
    top1: float
    covered: float
    """Share of the predicted tokens that the head has."""
    covered_perplexity: float
    """Over these alone, with no share for others."""
    covered_reference_perplexity: float
    missing: float
    absent: float
    """Mean probability that the model gives to tokens that the head lacks."""


def read_tokens(tokenizer: Tokenizer, path: Path, limit: int) -> list[int]:
    """The first `limit` tokens of a text file; CetaneError when it has fewer than two."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
    tokens = tokenizer.encode(text)[:limit]
    if len(tokens) < 2:
        raise CetaneError(f"{path}: a text of at least two tokens is needed")
    return tokens


def perplexity(
    bundle: Bundle, checkpoint: Checkpoint, tokens: list[int], progress: Progress
) -> Quality:
    """Perplexity in windows of the whole context, each predicted from its own start."""
    if bundle.plan.recipe.head.choose:
        raise CetaneError(f"{bundle.path} gives choices, not the logits that perplexity needs")
    context = bundle.plan.recipe.cache.context
    windows = [tokens[i : i + context] for i in range(0, len(tokens), context)]
    windows = [window for window in windows if len(window) > 1]
    widest: Mode = max(bundle.plan.modes, key=lambda mode: bundle.plan.modes[mode].tokens)
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    reference = Reference(checkpoint)
    subset = bundle.plan.recipe.head.subset
    missing = 0.0 if subset is None else subset.missing
    known = np.isin(np.arange(bundle.plan.vocab), bundle.plan.choosable)
    losses, reference_losses, plain, kl, top1, absent, hit = [], [], [], [], [], [], []
    for index, window in enumerate(windows):
        progress(f"{len(window)} tokens", index, len(windows))
        ours = engine.session([widest, "decode"]).feed(window, "all")
        assert ours is not None
        theirs = reference.run([window])[0].logits[:-1]
        ours, targets = ours[:-1], np.asarray(window[1:])
        q, p = metrics.log_softmax(ours), metrics.log_softmax(theirs)
        hit.append(known[targets])
        absent.append(np.exp(p[:, ~known]).sum(1))
        plain.append(metrics.losses(q, targets))
        q = metrics.with_missing(q, bundle.plan.choosable, missing)
        losses.append(metrics.losses(q, targets))
        reference_losses.append(metrics.losses(p, targets))
        kl.append(metrics.kl(q, p))
        top1.append(metrics.contains_top(ours, theirs, 1))
    progress("done", len(windows), len(windows))
    found, truth = metrics.perplexity(losses), metrics.perplexity(reference_losses)
    covered = np.concatenate(hit)
    limit = thresholds(bundle.plan)["perplexity_ratio"]
    return Quality(
        passed=found / truth <= limit,
        fingerprint=checkpoint.fingerprint,
        tokens=sum(len(window) - 1 for window in windows),
        perplexity=found,
        reference_perplexity=truth,
        ratio=found / truth,
        limit=limit,
        kl=float(np.concatenate(kl).mean()),
        top1=float(np.concatenate(top1).mean()),
        covered=float(covered.mean()),
        covered_perplexity=metrics.perplexity([np.concatenate(plain)[covered]]),
        covered_reference_perplexity=metrics.perplexity(
            [np.concatenate(reference_losses)[covered]]
        ),
        missing=missing,
        absent=float(np.concatenate(absent).mean()),
    )
