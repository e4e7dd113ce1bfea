"""Explains why a port was refused, in one sentence: cause, place and the change that mends it."""

from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any, Literal, Protocol

import tomli_w
from pydantic import Field, computed_field

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.gates.authored import Authored
from cetane.gates.bases import STATED
from cetane.gates.golden_result import NEAR_LIMIT, GoldenResult
from cetane.gates.ladder import LadderResult, climb
from cetane.gates.limits import limits
from cetane.gates.mends import better_weights, change_of, undone, written_by_host
from cetane.gates.probes import Way
from cetane.gates.readings import Misread, misread
from cetane.gates.reference import reference_of
from cetane.gates.residency.audit import Audit
from cetane.gates.rounding import Rounding, judge_quantized, judge_rounding
from cetane.gates.structure import OTHER_PLAN, OTHER_TAGS, WAYS, Deviation, other_parts
from cetane.gates.verdict import Check
from cetane.gates.weights import READING, WrongWeight
from cetane.hardware import LARGEST_FP16
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Recipe, key_path, override
from cetane.validation import Data

Cause = Literal[
    "weights",
    "authoring",
    "conversion",
    "contract",
    "fp16 range",
    "attention",
    "compression",
    "residency",
]

DIFF = "Run cetane diff BUNDLE --model CHECKPOINT."
BUILD_AND_DIFF = "Make a bundle with cetane build, and run cetane diff BUNDLE --model CHECKPOINT."
WITHOUT_DRAFTS = ", and run with --speculative none until then"
UNTIL_THEN: dict[Way, str] = {
    "rewind": ", and serve with --prefixes 0 until then",
    "draft": WITHOUT_DRAFTS,
    "tree": WITHOUT_DRAFTS,
    "last": "",
}
"""What to do about a fault of the host, beside a change of the recipe."""


class RefusedPort(Protocol):
    """The refused port: a bundle, or a port that is not yet a bundle."""

    @property
    def plan(self) -> Plan: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


class Explanation(Data):
    """The reason why a port was refused."""

    cause: Cause
    where: str
    """The first shard, block or constant."""
    sentence: str
    changes: dict[str, Any] = Field(default_factory=dict)
    """Values of the recipe that mend the port, by dotted key; empty where no recipe can."""

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own order
    @property
    def recipe_change(self) -> str | None:
        """The changes as lines of TOML, ready to paste; None without changes."""
        tables: dict[str, Any] = {}
        for key, value in self.changes.items():
            *path, name = key_path(key)
            table = tables
            for part in path:
                table = table.setdefault(part, {})
            table[name] = value
        return tomli_w.dumps(tables).strip() or None

    @property
    def mends(self) -> bool:
        """Whether the change mends the port: a smaller promise does not."""
        return bool(self.changes) and "quality" not in self.changes


def explain(
    port: RefusedPort, checkpoint: Checkpoint, verdict: GoldenResult, adapter: str | None = None
) -> Explanation | None:
    """The first cause of a refusal, since it hides the next ones; None for a port that passed.

    `verdict` is the result of `golden`, or with `adapter` that adapter's own result in it. If the
    graph is wrong, the authored modules run too, to tell authoring from conversion.
    """
    if verdict.passed:
        return None
    recipe = port.plan.recipe
    failed = [check for check in verdict.checks if not check.passed]
    stated = next((check for check in failed if check.name.endswith(STATED)), None)
    if stated is not None:
        return other_base(stated)
    red = [check.name for check in failed]
    adapted = tuple(f"{name}: " for name in verdict.adapters)
    if verdict.adapters and all(name.startswith(adapted) for name in red):
        name = red[0].partition(": ")[0]
        return with_adapter(name, explain(port, checkpoint, verdict.adapters[name], name))
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
        return beyond_fp16(verdict, recipe, Planner(checkpoint, recipe))
    if any(name.startswith("ane") for name in red):
        return lost_products(verdict, recipe)
    return too_compressed(verdict, Planner(checkpoint, recipe))


def with_adapter(name: str, own: Explanation | None) -> Explanation | None:
    """The explanation of a bundle that is red only with an adapter."""
    if own is None:
        return None
    return own.model_copy(
        update={
            "where": f"{own.where}, with the adapter {name}",
            "sentence": f"With the adapter {name}: {own.sentence}",
        }
    )


def other_base(check: Check) -> Explanation:
    """The explanation of an adapter that was trained on another base."""
    name = check.name.partition(": ")[0]
    return Explanation(
        cause="weights",
        where=f"the adapter {name}",
        sentence=f"The adapter {name} states a base whose weights are not those here: they differ "
        f"by {check.value:.2g}, the limit is {check.limit:g}. Give the adapter's own base.",
    )


def wrong_weights(verdict: GoldenResult, plan: Plan) -> Explanation:
    """The explanation of a wrong constant, or of an unused parameter."""
    if not verdict.wrong_weights:
        return Explanation(
            cause="authoring",
            where=verdict.unused[0].partition(":")[0],
            sentence=f"The port does not use all of the model: {verdict.unused[0]}.",
            changes=undone(plan.recipe),
        )
    first = verdict.wrong_weights[0]
    if first.shard == READING:
        return Explanation(
            cause="weights",
            where=first.label,
            sentence=f"cetane reads the {first.label} of the model's files otherwise than "
            f"transformers: {first.problem}. Port the model as save_pretrained of transformers "
            "writes it, and report the file.",
        )
    return other_constant(first, QUANTIZE_AGAIN if verdict.activations else PORT_AGAIN)


PORT_AGAIN = "Port the model again with --rebuild."
QUANTIZE_AGAIN = (
    "Run cetane quantize-activations again; its --smooth changes weights on purpose, which only "
    "the gate activations judges."
)
"""What to do about a wrong constant of a bundle with activations of 8 bits."""


def other_constant(wrong: WrongWeight, advice: str = PORT_AGAIN) -> Explanation:
    """The explanation of a constant that differs from the checkpoint."""
    what = f"{wrong.parameter} ({wrong.label})" if wrong.parameter else wrong.label
    return Explanation(
        cause="weights",
        where=f"{wrong.shard}/{wrong.label}",
        sentence=f"In {wrong.shard}, {what} differs from the checkpoint: {wrong.problem}. {advice}",
    )


def wrong_graph(
    port: RefusedPort, checkpoint: Checkpoint, verdict: GoldenResult, adapter: str | None
) -> Explanation:
    """The explanation of a wrong reading, or else of the first wrong tensor."""
    recipe, truth = port.plan.recipe, reference_of(checkpoint, adapter)
    authored = Authored(Planner(checkpoint, recipe).on(adapter), checkpoint, truth)
    if verdict.misread:
        return wrong_reading(verdict.misread[0], authored)
    plain = [one for one in verdict.structure if not one.way]
    first = first_off(plain) or first_off(verdict.structure)
    assert first is not None
    if first.way:
        return Explanation(
            cause="contract",
            where=place(first),
            sentence=f"{erring(first)}; a plain text is right, only {WAYS[first.way]} are wrong. "
            f"This is a fault of cetane: report it{UNTIL_THEN[first.way]}.",
            changes=written_by_host(recipe),
        )

    def right(modules: Authored) -> bool:
        return first_off(modules.deviations(port.tokenizer)) is None

    return wrong_tensor(first, verdict.structure, authored, right, DIFF)


def place(first: Deviation) -> str:
    """Where a wrong tensor is."""
    return f"{first.shard}, after {first.truth}"


def erring(first: Deviation) -> str:
    """By how much a tensor errs, and where, in words."""
    return (
        f"On the checkpoint's own weights, {first.tensor} of {first.shard} errs by "
        f"{first.relative:.2g} after {first.truth} ({first.mode}, {first.probe}, position "
        f"{first.position})"
    )


def wrong_tensor(
    first: Deviation,
    rows: Sequence[Deviation],
    authored: Authored,
    right: Callable[[Authored], bool],
    diff: str,
) -> Explanation:
    """The explanation of the first wrong tensor of some rows.

    If the torch modules are right, conversion is wrong: `diff` says how to find it. `right` judges
    modules as the port was judged.
    """
    recipe, modes = authored.planner.recipe, authored.planner.plan().modes
    what, where = erring(first), place(first)
    if right(authored):
        return Explanation(
            cause="conversion",
            where=where,
            sentence=f"{what}; the authored modules are right, so conversion changed the program. "
            f"{diff}",
        )
    off = sorted({one.mode for one in rows if off_limit(one)})
    if len(off) < len(modes) or right_with_host_caches(authored, right):
        return Explanation(
            cause="contract",
            where=where,
            sentence=f"{what}; a cache or a mask of {', '.join(off)} is wrong.",
            changes=written_by_host(recipe),
        )
    return Explanation(
        cause="authoring",
        where=where,
        sentence=f"{what}; the authored module is not the model.",
        changes=undone(recipe),
    )


def wrong_reading(read: Misread, authored: Authored) -> Explanation:
    """The explanation of a wrong reading: the cause is authoring if the torch modules have it, else
    conversion."""
    same = any(own.kind == read.kind for own in misread(authored, authored.reference))
    cause: Cause = "authoring" if same else "conversion"
    tail = "the authored modules have it too" if same else "conversion put it there"
    return Explanation(
        cause=cause,
        where=read.shard,
        sentence=f"{read.shard} is not the model's: {read.problem}; {tail}.",
    )


def right_with_host_caches(authored: Authored, right: Callable[[Authored], bool]) -> bool:
    """Whether the torch modules are right with caches that the host writes."""
    recipe, weights = authored.planner.recipe, authored.weights
    changes = written_by_host(recipe)
    if not changes:
        return False
    planner = Planner(weights, override(recipe, changes)).on(authored.planner.adapter)
    return right(Authored(planner, weights, authored.reference))


def off_limit(one: Deviation) -> bool:
    """Whether a deviation is beyond the limit of structure."""
    return one.relative > limits().structure.relative


def first_off(rows: Sequence[Deviation]) -> Deviation | None:
    """The first tensor beyond its limit, in the order of the shards."""
    return next((one for one in rows if off_limit(one)), None)


def lost_products(verdict: GoldenResult, recipe: Recipe) -> Explanation:
    """The explanation of errors that only an ANE's arithmetic makes: of the worst mode that failed
    a check."""
    worst = min(spoiled("ane", verdict), key=lambda one: one.logit_cosine)
    return Explanation(
        cause="attention",
        where=worst.where or f"the {worst.mode} functions",
        sentence=f"Over {worst.capacity or recipe.cache.context} keys, an ANE would count products "
        f"of attention as zero, since they are small: KL {worst.kl:.2g} from the same programs in "
        "fp32. The family must multiply softmax's weights by a power of two "
        "(docs/explanation/precision.md).",
    )


def spoiled(arithmetic: Literal["fp16", "ane"], verdict: GoldenResult) -> list[Rounding]:
    """The modes that failed a check of an arithmetic."""
    red = {check.name for check in verdict.checks if not check.passed}
    rows = verdict.rounding if arithmetic == "fp16" else verdict.ane
    return [
        one for one in rows if any(check.name in red for check in judge_rounding(arithmetic, [one]))
    ]


def beyond_fp16(verdict: GoldenResult, recipe: Recipe, planner: Planner) -> Explanation:
    """The explanation of rounding errors, with the power of two that brings the stream into
    fp16."""
    largest = max(verdict.ranges, key=lambda one: one.largest)
    worse = spoiled("fp16", verdict)
    where = next((one.where for one in worse if one.where), largest.block)
    modes = dict.fromkeys(one.mode for one in worse)
    lost = "loses too many digits" if all(one.finite for one in worse) else "leaves fp16's range"
    scale = planner.model.residual_scale
    if largest.largest <= NEAR_LIMIT:
        return Explanation(
            cause="fp16 range",
            where=where,
            sentence=f"Rounding to fp16 spoils {where} ({', '.join(modes)}), though the residual "
            f"stream stays at {largest.largest:.0f}: an op inside {lost}.",
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
    if rounded and (first in judge_quantized(rounded) or 2 * rounded[0].kl > verdict.twin_kl):
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


def explain_ladder(verdict: LadderResult, checkpoint: Checkpoint, recipe: Recipe) -> Explanation:
    """Why the first shards of every kind were refused. If a graph is wrong, their authored modules
    run on the same tokens."""
    first = next(check for check in verdict.checks if not check.passed)
    if first.name.endswith(STATED):
        return other_base(first)
    if verdict.wrong_weights:
        return other_constant(verdict.wrong_weights[0])
    wrong_row = first_off(verdict.structure)
    assert wrong_row is not None
    shards = dict.fromkeys(one.shard for one in verdict.structure)

    def right(modules: Authored) -> bool:
        planner = modules.unrounded
        judged = climb(modules.engine(planner), planner, checkpoint, shards)
        return not any(off_limit(row) for _, row in judged)

    authored = Authored(Planner(checkpoint, recipe), checkpoint, reference_of(checkpoint))
    return wrong_tensor(wrong_row, verdict.structure, authored, right, BUILD_AND_DIFF)


def explain_residency(audited: Audit, plan: Plan) -> Explanation:
    """Why a refused audit's programs would not run on the ANE: the first finding that refuses them,
    and its mend."""
    severe = limits().residency.severities
    findings = [
        (f"{one.package}/{one.function}", finding)
        for one in audited.functions
        for finding in one.findings
    ]
    findings += [("the bundle", finding) for finding in audited.findings]
    worst = [item for item in findings if item[1].severity in severe]
    off = [item for item in findings if item[1].placement in ("CPU", "fails", "wrong")]
    said = f"On {audited.target}, predicted: {audited.reasons[0]}"
    if not (worst or off):
        return Explanation(cause="residency", where="the bundle", sentence=f"{said}.")
    where, first = (worst or off)[0]
    return Explanation(
        cause="residency",
        where=where,
        sentence=f"{said}; in {where}, {first.rule}: {first.message}. To mend: {first.fix}.",
        changes=change_of(first.rule, plan),
    )
