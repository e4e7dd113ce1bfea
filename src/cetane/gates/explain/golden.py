"""Explains a red verdict of the golden gate."""

from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cetane.checkpoint import Checkpoint
from cetane.files import documentation
from cetane.gates import metrics
from cetane.gates.bases import STATED
from cetane.gates.explain.explanation import Explanation, RefusedPort, with_lost
from cetane.gates.explain.graph import wrong_graph
from cetane.gates.explain.mends import better_weights
from cetane.gates.explain.weights import other_base, wrong_weights
from cetane.gates.golden_result import NEAR_LIMIT, GoldenResult
from cetane.gates.limits import limits
from cetane.gates.manifest import OTHER_PLAN, OTHER_TAGS, other_parts
from cetane.gates.reference import Reference, decoder_of, reference_of
from cetane.gates.rounding import QUANTIZED, Rounding, judge_rounding
from cetane.hardware import LARGEST_FP16
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

HALF_STEP = 2.0**-11
"""The largest error of a number that is rounded to fp16, over the number."""
TRIALS = 8
"""Random errors of the embeddings."""
ROUNDINGS = 32
"""How many ops of a layer round one after the other, about."""
REPORT = "No recipe mends that: report it"


def explain(
    port: RefusedPort, checkpoint: Checkpoint, verdict: GoldenResult, adapter: str | None = None
) -> Explanation | None:
    """The first cause of a refusal, since it hides the next ones; None for a port that passed.

    `verdict` is the result of `golden`, or with `adapter` that adapter's own result in it. If the
    graph is wrong, the authored modules run too, to tell authoring from conversion.
    """
    if verdict.passed:
        return None
    found = first_cause(port, checkpoint, verdict, adapter)
    return None if found is None else with_lost(found, verdict.lost)


def first_cause(
    port: RefusedPort, checkpoint: Checkpoint, verdict: GoldenResult, adapter: str | None
) -> Explanation | None:
    """The first cause of a refusal, without the place of infinity or NaN."""
    recipe = port.plan.recipe
    failed = [check for check in verdict.checks if not check.passed]
    stated = next((check for check in failed if check.name.endswith(STATED)), None)
    if stated is not None:
        return other_base(stated)
    red = [check.name for check in failed]
    adapted = tuple(f"{name}: " for name in verdict.adapters)
    if verdict.adapters and all(name.startswith(adapted) for name in red):
        name = red[0].partition(": ")[0]
        return of_adapter(name, explain(port, checkpoint, verdict.adapters[name], name))
    if verdict.wrong_weights or verdict.unused:
        return wrong_weights(verdict, port.plan)
    if not {OTHER_PLAN, OTHER_TAGS}.isdisjoint(red):
        parts = other_parts(port.plan, Planner(checkpoint, recipe).plan())
        parts += ["tags"] if OTHER_TAGS in red else []
        return Explanation(
            cause="contract",
            where="manifest.json",
            sentence=f"The manifest is another one than its recipe makes: {', '.join(parts)}. "
            "Port the model again with --rebuild.",
        )
    if any(name.startswith("structure") for name in red):
        return wrong_graph(port, checkpoint, verdict, adapter)
    if any(name.startswith("fp16") for name in red):
        return beyond_fp16(
            verdict, Planner(checkpoint, recipe), lambda: reference_of(checkpoint, adapter)
        )
    if any(name.startswith("ane") for name in red):
        return lost_products(verdict, recipe)
    return too_compressed(verdict, Planner(checkpoint, recipe))


def of_adapter(name: str, own: Explanation | None) -> Explanation | None:
    """The explanation of a bundle that is red only with an adapter."""
    if own is None:
        return None
    return own.model_copy(
        update={
            "where": f"{own.where}, with the adapter {name}",
            "sentence": f"With the adapter {name}: {own.sentence}",
        }
    )


def beyond_fp16(
    verdict: GoldenResult, planner: Planner, reference: Callable[[], Reference]
) -> Explanation:
    """The explanation of rounding errors, with the power of two that brings the stream into
    fp16."""
    largest = max(verdict.ranges, key=lambda one: one.largest)
    worse = spoiled("fp16", verdict)
    others = other_choices("fp16", verdict)
    where = next((one.where for one in worse if one.where), largest.block)
    modes = dict.fromkeys(one.mode for one in worse)
    scale = planner.model.residual_scale
    if largest.largest <= NEAR_LIMIT and others is not None:
        return others
    if largest.largest <= NEAR_LIMIT:
        lost = f"an op inside leaves fp16's range. {REPORT}"
        if all(one.finite for one in worse):
            lost = lost_digits(verdict, worse, len(planner.model.layers), reference())
        return Explanation(
            cause="fp16 range",
            where=where,
            sentence=f"Rounding to fp16 spoils {where} ({', '.join(modes)}), though the residual "
            f"stream stays at {largest.largest:.0f}: {lost}.",
        )
    said = (
        f"The residual stream reaches {largest.largest:.0f} after {largest.block}; "
        f"fp16 ends at {LARGEST_FP16:.0f}"
    )
    if scale is None:
        return Explanation(
            cause="fp16 range",
            where=largest.block,
            sentence=f"{said}, and this family cannot scale it.",
        )
    power = scale * 2.0 ** -ceil(log2(largest.largest / NEAR_LIMIT))
    return Explanation(
        cause="fp16 range",
        where=largest.block,
        sentence=f"{said}. A stream {power:g} times as large is the same model.",
        changes={"family.residual_scale": power},
    )


def lost_digits(
    verdict: GoldenResult, worse: Sequence[Rounding], layers: int, reference: Reference
) -> str:
    """In words: whether an op loses digits, or the model magnifies any rounding.

    Rounding its embeddings alone moves such a model. A port rounds some `ROUNDINGS` times a layer,
    and may move as many times as far.
    """
    for one in worse:
        tokens = verdict.probes["text from 0" if one.text else f"start, {one.mode}"]
        moved = moved_by_rounding(reference, tokens)
        if 1 - min(one.hidden_cosine, one.logit_cosine) > ROUNDINGS * layers * moved:
            return f"an op inside loses too many digits. {REPORT}"
    return (
        "the model itself magnifies any rounding. Embeddings off by half a step of fp16 alone turn "
        f"its logits by {moved:.1g} (1 - cosine), and every op rounds. Random or hardly trained "
        "weights do so, and no recipe mends them"
    )


def moved_by_rounding(reference: Reference, tokens: Sequence[int]) -> float:
    """How far the model's logits turn if its embeddings are off by half a step of fp16, at random:
    1 - cosine, the mean over tokens and some trials."""
    generator = torch.Generator().manual_seed(0)

    def off(_: Any, __: Any, rows: Tensor) -> Tensor:
        return rows * (1 + HALF_STEP * (2 * torch.rand(rows.shape, generator=generator) - 1))

    (exact,) = reference.run([tokens])
    hook = decoder_of(reference.model).get_input_embeddings().register_forward_hook(off)
    try:
        trials = reference.run([tokens] * TRIALS)
    finally:
        hook.remove()
    return 1 - float(np.mean([metrics.cosine(exact.logits, one.logits) for one in trials]))


def lost_products(verdict: GoldenResult, recipe: Recipe) -> Explanation:
    """The explanation of errors that only an ANE's arithmetic makes: of the worst mode that failed
    a check."""
    worse = spoiled("ane", verdict)
    lost = next((one for one in worse if not one.finite), None)
    if lost is not None:
        return Explanation(
            cause="fp16 range",
            where=lost.where,
            sentence=f"At the end of {lost.capacity or recipe.cache.context} tokens, {lost.where} "
            f"({lost.mode}) has infinity or NaN in an ANE's arithmetic, and not in fp32: an op "
            f"inside leaves fp16's range. {REPORT}.",
        )
    others = other_choices("ane", verdict)
    if others is not None:
        return others
    worst = min(worse, key=lambda one: one.logit_cosine)
    return Explanation(
        cause="attention",
        where=worst.where or f"the {worst.mode} functions",
        sentence=f"Over {worst.capacity or recipe.cache.context} keys, an ANE would count products "
        f"of attention as zero, since they are small: KL {worst.kl:.2g} from the same programs in "
        "fp32. The family must multiply softmax's weights by a power of two: "
        f"{documentation('explanation/precision.md')} says why.",
    )


def other_choices(arithmetic: Literal["fp16", "ane"], verdict: GoldenResult) -> Explanation | None:
    """The explanation of an arithmetic that spoils routers: of the worst mode. None if it changes
    few choices, or gives infinity or NaN."""
    worse = spoiled(arithmetic, verdict)
    most = getattr(limits(), arithmetic).other_experts
    shares = [(max(one.other_experts or 0, one.other_far or 0), one) for one in worse]
    share, one = max(shares, key=lambda pair: pair[0])
    if share <= most or not all(other.finite for other in worse):
        return None
    kind = "which experts are far" if share == one.other_far else "the choice of experts"
    said = {"fp16": "Rounding to fp16", "ane": "An ANE's arithmetic"}[arithmetic]
    return Explanation(
        cause="experts",
        where=f"the {one.mode} functions",
        sentence=f"{said} changes {kind} in {share:.0%} of all cases ({one.mode}), and near ties "
        f"explain {most:.0%} at most: the logits of routers lose digits, or the model hardly "
        "prefers any expert. No recipe mends that.",
    )


def spoiled(arithmetic: Literal["fp16", "ane"], verdict: GoldenResult) -> list[Rounding]:
    """The modes that failed a check of an arithmetic."""
    red = {check.name for check in verdict.checks if not check.passed}
    rows = verdict.rounding if arithmetic == "fp16" else verdict.ane
    return [
        one for one in rows if any(check.name in red for check in judge_rounding(arithmetic, [one]))
    ]


def too_compressed(verdict: GoldenResult, planner: Planner) -> Explanation:
    """The explanation of a port that breaks its recipe's promise of quality."""
    recipe = planner.recipe
    worst = min(verdict.shards, key=lambda one: one.cosine, default=None)
    where = worst.shard if worst else ""
    failed = [check for check in verdict.checks if not check.passed]
    first = failed[0]
    undecided = all(check.interval is not None and not check.decided for check in failed)
    tail = (
        f" After {verdict.positions} positions the interval still holds the limit, so it is not "
        "proven."
        if undecided
        else ""
    )
    short = (
        f"{first.name.partition(': ')[2]} is {first.value:.3g}{first.between}, the limit "
        f"{first.limit:g}.{tail}"
    )
    streaming = recipe.cache.streaming
    if streaming and verdict.logits and 2 * verdict.twin_kl < verdict.logits[0].kl:
        full = min(1.0, streaming.full + 0.25)
        return Explanation(
            cause="compression",
            where=where,
            sentence="Weights and graph are right; heads that stream miss more than "
            f"{recipe.quality!r} allows: {short}",
            changes={"cache.streaming.full": full} if full > streaming.full else {},
        )
    rounded = verdict.activations
    if rounded and (first.name.startswith(QUANTIZED) or 2 * rounded[0].kl > verdict.twin_kl):
        turned = recipe.compression.rotate
        advice = "" if turned else ", or turn its channels first (--set compression.rotate=true)"
        return Explanation(
            cause="compression",
            where=where,
            sentence="Weights and graph are right; activations of 8 bits cost too much: "
            f"{short} Keep the bundle that quantize-activations was given{advice}.",
        )
    if recipe.cache.format == "int8" and 2 * verdict.cache_kl > verdict.twin_kl:
        return Explanation(
            cause="compression",
            where=where,
            sentence="Weights and graph are right; caches of 8 bits cost more than "
            f"{recipe.quality!r} allows: {short}",
            changes={"cache.format": "fp16"},
        )
    form, changes = better_weights(planner)
    return Explanation(
        cause="compression",
        where=where,
        sentence=f"Weights and graph are right; compression ({form}) costs "
        f"more than {recipe.quality!r} allows: {short}",
        changes=changes,
    )
