"""Quantization and its judgement in one call, for the command and the lab's experiments."""

import time
from collections.abc import Sequence
from pathlib import Path

from cetane.activations.quantize import Options, Quantized, quantized
from cetane.activations.samples import held_out
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.files import Progress, disk_errors, silent
from cetane.gates.activations import LIMIT, Score, judge, judge_score
from cetane.gates.probes import windows
from cetane.gates.quality import read_tokens, refuse_choices
from cetane.gates.verdict import Check
from cetane.pipeline.origin import checkpoint_of
from cetane.validation import Data


class ActivationOutcome(Data):
    """The quality of a bundle before and after its activations were quantized, on held-out text."""

    passed: bool
    checks: tuple[Check, ...]
    """The least mean cosine of a shard's hidden states or of the logits, against `limit`, and the
    promise of the recipe (`quality`)."""
    limit: float
    source: str = ""
    """Path, URL or hub id of the checkpoint with which both are compared; empty in older
    results."""
    fingerprint: str
    """Fingerprint of the checkpoint with which both are compared."""
    made: Quantized
    tokens: int
    """Tokens that were predicted."""
    reference_perplexity: float
    """Perplexity of the Hugging Face model."""
    before: Score
    after: Score
    bytes_before: int
    bytes_after: int
    """Bytes of all shards' packages."""
    seconds: float
    """Seconds of the quantization, with calibration and, if chosen, smoothing."""


def judge_activations(
    bundle: str | Path,
    target: Path,
    options: Options,
    *,
    model: str | Path | None = None,
    text: Path | None = None,
    tokens: int = 1024,
    force: bool = False,
    progress: Progress = silent,
) -> ActivationOutcome:
    """`measure_activations` of a bundle by its path, on a text file or on held-out prompts.

    `model` is the checkpoint, if it is no longer in the place that the build used.
    """
    opened = Bundle(Path(bundle))
    opened.verify()
    checkpoint = checkpoint_of(opened, model)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        texts = held_out(opened, tokens)
    else:
        ids = read_tokens(opened.tokenizer, text, tokens)
        texts = windows(ids, opened.plan.recipe.cache.context)
    return measure_activations(opened, checkpoint, options, texts, target, progress, force)


def measure_activations(
    bundle: Bundle, checkpoint: Checkpoint, options: Options, texts: Sequence[Sequence[int]],
    target: Path, progress: Progress, force: bool = False,
) -> ActivationOutcome:  # fmt: skip
    """Write `bundle` with quantized activations to `target`, and compare both with the model.

    `texts` are the token ids of the held-out text, in windows of at most the bundle's context:
    `held_out(bundle, tokens)`, or `gates.probes.windows(ids, context)`. A bundle of recipe `int8`
    becomes W8A8, one of `palette4` W4A8. `NAIVE` is the published port's experiment 3.9;
    `Options()` is realistic.

    Figures of the result: `passed`, `after.cosine` (the least of a shard's or the logits'),
    `after.perplexity` beside that of `before` and `reference_perplexity`, `after.logits.kl` and
    `.top1`. The new bundle stores it with its gates as `activations`, before it takes its place.
    Raises CetaneError as `quantize_activations` and `judge`.
    """
    refuse_choices(bundle)  # as the judge would, but after the calibration
    started = time.perf_counter()
    with quantized(bundle, target, options, progress, checkpoint, force) as (after, made):
        seconds = time.perf_counter() - started
        scores = judge({"before": bundle, "after": after}, checkpoint, texts, progress)
        checks = tuple(judge_score(scores, "after", after.plan.recipe.quality))
        outcome = ActivationOutcome(
            passed=all(check.passed for check in checks),
            checks=checks,
            limit=LIMIT,
            source=checkpoint.source,
            fingerprint=checkpoint.fingerprint,
            made=made,
            tokens=scores.tokens,
            reference_perplexity=scores.reference_perplexity,
            before=scores.bundles["before"],
            after=scores.bundles["after"],
            bytes_before=bundle.manifest.package_bytes,
            bytes_after=after.manifest.package_bytes,
            seconds=seconds,
        )
        after.write_gate("activations", outcome.model_dump(mode="json"))
    return outcome
