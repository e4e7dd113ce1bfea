"""The quality of a port on text, against the Hugging Face model and its own twin.

The recipe promises a `quality`, and the port must keep it at any number of bits.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import LARGEST_TEXT, Progress, read_text
from cetane.gates import metrics
from cetane.gates.limits import QualityLimits, limits
from cetane.gates.probes import widest_mode, windows
from cetane.gates.reference import reference_of
from cetane.gates.verdict import Check, at_most, share
from cetane.schema.recipe import Recipe
from cetane.validation import Data


class TextQuality(Data):
    """Perplexities over the predicted tokens, and the agreement of the predictions.

    A head that lacks tokens would give a text with such a token no probability. So all missing
    tokens together get the probability `missing`, in equal parts. This share comes with the head's
    subset, from text that neither chose the subset nor judges it here. So perplexity, ratio and KL
    are over all tokens, and include the loss by the subset.
    """

    passed: bool
    source: str = ""
    """The checkpoint's path, URL or hub id; empty in older results."""
    fingerprint: str
    """The checkpoint's fingerprint."""
    tokens: int
    """The number of predicted tokens."""
    perplexity: float
    reference_perplexity: float
    ratio: float
    limit: float
    """The largest allowed ratio."""
    kl: float
    """The mean KL from the model, in nats a token."""
    kl_limit: float | None = None
    """The largest allowed KL; None in older results, which had none. A port that is another model
    may find a text as likely."""
    top1: float
    """The share of tokens whose best prediction is the model's."""
    covered: float
    """The share of predicted tokens that the head has."""
    covered_perplexity: float | None
    """The perplexity over the covered tokens alone, with no share for missing tokens; None if no
    token is covered."""
    covered_reference_perplexity: float | None
    missing: float
    absent: float
    """The model's mean probability for tokens that the head lacks."""
    warnings: tuple[str, ...] = ()


def sure(logits: Array) -> Array:
    """Whether the model is sure of its best token, for rows of logits `(n, V)`: bool `(n,)`."""
    wide: Array = metrics.margins(logits) >= limits().evidence.margin
    return wide


class Agreement:
    """The agreement of a port's predictions with the model's, window by window."""

    def __init__(self, recipe: Recipe, tokens: Array, vocabulary: int) -> None:
        """`tokens (n,)` are the head's tokens, `vocabulary` is the number of the model's tokens."""
        self.subset, self.tokens = recipe.head.subset, tokens
        self.known = np.isin(np.arange(vocabulary), tokens)
        self.missing = 0.0 if self.subset is None else self.subset.missing
        self.rows: dict[str, list[Array]] = {}

    def add(self, ours: Array, theirs: Array, targets: Array) -> None:
        """Add the logits `(n, V)` of port and model, and the tokens `(n,)` that come next."""
        for rows in metrics.blocks(*ours.shape):
            self._add(ours[rows], theirs[rows], targets[rows])

    def _add(self, ours: Array, theirs: Array, targets: Array) -> None:
        q, p = metrics.log_softmax(ours), metrics.log_softmax(theirs)
        plain = metrics.losses(q, targets)
        q = metrics.with_missing(q, self.tokens, self.missing)
        best = self.known[theirs.argmax(1)]
        rows = {
            "covered": self.known[targets],
            "absent": np.exp(p[:, ~self.known]).sum(1),
            "plain": plain,
            "losses": metrics.losses(q, targets),
            "reference": metrics.losses(p, targets),
            "kl": metrics.kl(q, p),
            "top1": metrics.contains_top(ours, theirs, 1),
            "decided": best & sure(theirs),
            "best": best,
        }
        for name, values in rows.items():
            self.rows.setdefault(name, []).append(values)

    def all(self, name: str) -> Array:
        """A figure `(n,)` of all positions."""
        return np.concatenate(self.rows[name])

    def mean(self, name: str) -> float:
        return float(self.all(name).mean())

    @property
    def perplexities(self) -> tuple[float, float]:
        """The perplexities of the port and of the model."""
        return metrics.perplexity(self.rows["losses"]), metrics.perplexity(self.rows["reference"])

    @property
    def ratio(self) -> float:
        ours, theirs = self.perplexities
        return ours / theirs

    def quality(self, fingerprint: str, promised: QualityLimits) -> TextQuality:
        """All figures, and whether they keep what is promised."""
        ours, theirs = self.perplexities
        limit, covered, kl = promised.perplexity_ratio, self.all("covered"), self.mean("kl")
        plain, reference = (
            metrics.perplexity([self.all(name)[covered]]) if covered.any() else None
            for name in ("plain", "reference")
        )
        return TextQuality(
            passed=ours / theirs <= limit and theirs < metrics.WORST and kl <= promised.kl,
            fingerprint=fingerprint,
            tokens=len(covered),
            perplexity=ours,
            reference_perplexity=theirs,
            ratio=ours / theirs,
            limit=limit,
            kl=kl if math.isfinite(kl) else metrics.WORST,
            kl_limit=promised.kl,
            top1=self.mean("top1"),
            covered=float(covered.mean()),
            covered_perplexity=plain,
            covered_reference_perplexity=reference,
            missing=self.missing,
            absent=self.mean("absent"),
        )

    def judge(self, recipe: Recipe) -> list[Check]:
        """The checks against the recipe's promise. A head that only chooses has no
        probabilities."""
        promised, ask = limits().quality[recipe.quality], limits().evidence
        decided, best = self.all("decided"), self.all("best")
        hits = self.all("top1")[decided]
        name = f"compression, {recipe.quality}"
        checks = [
            share(f"{name}: top-1 of decided tokens", int(hits.sum()), len(hits), promised.top1,
                  ask.confidence)
        ]  # fmt: skip
        if self.subset is not None:
            checks.append(
                share(f"{name}: best token in the head", int(best.sum()), len(best), promised.best,
                      ask.confidence)
            )  # fmt: skip
        if not recipe.head.choose:
            checks.append(at_most(f"{name}: KL", self.mean("kl"), promised.kl))
            checks.append(
                at_most(f"{name}: perplexity ratio", self.ratio, promised.perplexity_ratio)
            )
        return checks


def read_tokens(tokenizer: Tokenizer, path: Path, limit: int) -> list[int]:
    """The first `limit` tokens of a text file. Raises CetaneError for fewer than two."""
    tokens = tokenizer.encode_first(read_text(path, LARGEST_TEXT), limit)
    if len(tokens) < 2:
        raise CetaneError(f"{path}: the text has fewer than two tokens", "give a longer text")
    return tokens


def perplexity(
    bundle: Bundle, checkpoint: Checkpoint, tokens: list[int], progress: Progress
) -> TextQuality:
    """Perplexity of token ids in windows of the whole context, each without the text before it, and
    how far the predictions are from the model's.

    In the reference all heads see all tokens, even if heads of the bundle stream.

    Raises CetaneError for a head that gives only its choice."""
    refuse_choices(bundle)
    pieces = windows(tokens, bundle.plan.recipe.cache.context)
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    reference = reference_of(checkpoint)
    agreement = Agreement(bundle.plan.recipe, engine.plan.choosable, bundle.plan.vocab)
    for index, piece in enumerate(pieces):
        progress(f"{len(piece)} tokens", index, len(pieces))
        ours = engine.session([widest_mode(bundle.plan), "decode"]).feed(piece, "all")
        assert ours is not None
        with reference.seeing_all():
            theirs = reference.run([piece])[0].logits
        agreement.add(ours[:-1], theirs[:-1], np.asarray(piece[1:]))
    progress("done", len(pieces), len(pieces))
    return agreement.quality(checkpoint.fingerprint, limits().quality[bundle.plan.recipe.quality])


def refuse_choices(bundle: Bundle) -> None:
    """Raise CetaneError for a bundle whose head gives only its choice."""
    if bundle.plan.recipe.head.choose:
        raise CetaneError(
            f"{bundle.path} gives choices, not logits, which judging needs",
            "port with --set head.choose=false",
        )


def greedy_check(agreed: Sequence[Array], recipe: Recipe) -> Check:
    """The check on the share of greedy tokens, over all prompts, that the model also chooses."""
    hits, limit = np.concatenate(agreed), limits().quality[recipe.quality].greedy
    name = f"compression, {recipe.quality}: greedy tokens"
    return share(name, int(hits.sum()), len(hits), limit, limits().evidence.confidence)
