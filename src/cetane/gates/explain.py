"""The explanation of a failed golden gate, in one sentence: cause, place and mending change."""

from collections.abc import Iterator, Sequence
from math import ceil, log2
from typing import Literal, Protocol

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.compress import parse_format
from cetane.gates.authored import Authored
from cetane.gates.golden import GoldenResult
from cetane.gates.limits import limits
from cetane.gates.readings import Misread, misread
from cetane.gates.reference import Reference
from cetane.gates.structure import Deviation, excess
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Quality, Recipe
from cetane.validation import Data

Cause = Literal["weights", "authoring", "conversion", "contract", "fp16 range", "compression"]
LARGEST = 32752.0
"""Half of the largest fp16 number: the limit for a scaled residual stream."""
READONLY = '[cache]\ncontract = "readonly"\nsliding = "readonly"'
"""The simplest caches: the host writes them."""
BETTER = {
    4: "palette6-kmeans-group32",
    6: "int8-per-channel",
    8: "fp16",
}
"""The next better format, for a format with too few bits."""


class Judged(Protocol):
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
    recipe_change: str | None = None
    """Lines of TOML that mend it, if a recipe can."""


def explain(bundle: Judged, checkpoint: Checkpoint, verdict: GoldenResult) -> Explanation | None:
    """The first cause, in the order in which one hides the next; None for a port that passed.

    Runs the authored modules where the graph is wrong, to tell authoring from conversion.
    """
    if verdict.passed:
        return None
    recipe = bundle.plan.recipe
    red = [check.name for check in verdict.checks if not check.passed]
    if verdict.wrong_weights or verdict.unused:
        return wrong_weights(verdict, bundle.plan)
    if any(name.startswith("structure") for name in red):
        return wrong_graph(bundle, checkpoint, verdict)
    if any(name.startswith("fp16") for name in red):
        return beyond_fp16(verdict, recipe, Planner(checkpoint, recipe))
    return too_compressed(verdict, recipe)


def wrong_weights(verdict: GoldenResult, plan: Plan) -> Explanation:
    """The explanation of a constant that differs from the checkpoint, or of an unused parameter."""
    if not verdict.wrong_weights:
        return Explanation(
            cause="authoring",
            where=verdict.unused[0].partition(":")[0],
            sentence=f"The port does not use all of the model: {verdict.unused[0]}.",
            recipe_change=undone(plan.recipe),
        )
    first = verdict.wrong_weights[0]
    what = f"{first.parameter} ({first.label})" if first.parameter else first.label
    return Explanation(
        cause="weights",
        where=f"{first.shard}/{first.label}",
        sentence=f"The package {first.shard} holds other weights than the checkpoint: "
        f"{what}: {first.problem}. Port the model again with --rebuild.",
    )


def wrong_graph(bundle: Judged, checkpoint: Checkpoint, verdict: GoldenResult) -> Explanation:
    """The explanation of the first wrong tensor. If the torch modules are right, conversion
    errs."""
    recipe = bundle.plan.recipe
    authored = Authored(Planner(checkpoint, recipe), checkpoint, Reference(checkpoint))
    if verdict.misread:
        return wrong_reading(verdict.misread[0], authored)
    first = first_off(verdict.structure)
    assert first is not None
    what = (
        f"On the checkpoint's own weights, {first.tensor} of {first.shard} errs by "
        f"{first.relative:.2g} after {first.truth} ({first.mode}, {first.probe}, position "
        f"{first.position})"
    )
    where = f"{first.shard}, after {first.truth}"
    if first_off(authored.deviations(bundle.tokenizer)) is None:
        return Explanation(
            cause="conversion",
            where=where,
            sentence=f"{what}; the authored modules are right, so conversion "
            "changed the program. Run cetane diff BUNDLE --model CHECKPOINT.",
        )
    off = sorted({one.mode for one in verdict.structure if off_limit(one)})
    if len(off) < len(bundle.plan.modes) or mended(bundle, checkpoint, authored):
        plain = (recipe.cache.contract, recipe.cache.sliding or "readonly") == 2 * ("readonly",)
        return Explanation(
            cause="contract",
            where=where,
            sentence=f"{what}; a cache or a mask of {', '.join(off)} is wrong.",
            recipe_change=None if plain else READONLY,
        )
    return Explanation(
        cause="authoring",
        where=where,
        sentence=f"{what}; the authored module is not the model.",
        recipe_change=undone(recipe),
    )


def wrong_reading(read: Misread, authored: "Authored") -> Explanation:
    """The explanation of a wrong reading: the torch modules have it, or conversion made it."""
    same = any(own.kind == read.kind for own in misread(authored, authored.reference))
    cause: Cause = "authoring" if same else "conversion"
    tail = "the authored modules have it too" if same else "conversion put it there"
    return Explanation(
        cause=cause,
        where=read.shard,
        sentence=f"{read.shard} is not the model's: {read.problem}; {tail}.",
    )


def mended(bundle: Judged, checkpoint: Checkpoint, authored: "Authored") -> bool:
    """Whether the torch modules are right with caches that the host writes."""
    recipe = bundle.plan.recipe
    host_written = {"contract": "readonly", "sliding": None, "padded": False}
    plain = recipe.cache.model_copy(update=host_written)
    if plain == recipe.cache:
        return False
    planner = Planner(checkpoint, recipe.model_copy(update={"cache": plain}))
    other = Authored(planner, checkpoint, authored.reference)
    return first_off(other.deviations(bundle.tokenizer)) is None


def off_limit(one: Deviation) -> bool:
    return excess(one) > limits().structure.relative


def first_off(found: Sequence[Deviation]) -> Deviation | None:
    """The first tensor beyond its limit, in the order of the shards."""
    return next((one for one in found if off_limit(one)), None)


def undone(recipe: Recipe) -> str | None:
    """The change that undoes a recipe's own departure from the model; None if it has none."""
    departures = recipe.family.get("departures")
    if departures:
        return "[family]\ndepartures = []"
    if recipe.family.get("full_window"):
        return f"[family]\nfull_window = {recipe.cache.context}"
    return None


def beyond_fp16(verdict: GoldenResult, recipe: Recipe, planner: Planner) -> Explanation:
    """The explanation of rounding errors, with the power of two that brings the stream into
    fp16."""
    largest = max(verdict.ranges, key=lambda one: one.largest)
    where = next((one.where for one in verdict.rounding if one.where), largest.block)
    scale = planner.model.residual_scale
    if largest.largest <= LARGEST:
        return Explanation(
            cause="fp16 range",
            where=where,
            sentence=f"Rounding to fp16 spoils {where}, though the residual "
            f"stream stays at {largest.largest:.0f}: an op inside overflows or loses.",
        )
    said = (
        f"The residual stream reaches {largest.largest:.0f} after {largest.block}; "
        "fp16 ends at 65504"
    )
    if scale is None:
        return Explanation(
            cause="fp16 range",
            where=largest.block,
            sentence=f"{said}, and this family cannot scale it.",
        )
    power = scale * 2.0 ** -ceil(log2(largest.largest / LARGEST))
    return Explanation(
        cause="fp16 range",
        where=largest.block,
        sentence=f"{said}. A stream {power:g} times as large is the same model.",
        recipe_change=f"[family]\nresidual_scale = {power!r}",
    )


def too_compressed(verdict: GoldenResult, recipe: Recipe) -> Explanation:
    """The explanation of a port that breaks its recipe's promise of quality."""
    worst = min(verdict.shards, key=lambda one: one.cosine, default=None)
    failed = [check for check in verdict.checks if not check.passed]
    first = failed[0]
    undecided = all(check.interval is not None and not check.decided for check in failed)
    bits = parse_format(recipe.compression.default).bits
    better = next((form for most, form in BETTER.items() if bits <= most), None)
    tail = (
        f" After {verdict.positions} positions the interval still holds the limit, so it is not "
        "proven."
        if undecided
        else ""
    )
    where = worst.shard if worst else ""
    lines = [*([f'[compression]\ndefault = "{better}"'] if better else []), *weaker(recipe.quality)]
    return Explanation(
        cause="compression",
        where=where,
        sentence=f"Weights and graph are right; compression ({recipe.compression.default}) costs "
        f"more than {recipe.quality!r} allows: {first.name.partition(': ')[2]} is "
        f"{first.value:.3g}, the limit {first.limit:g}.{tail}",
        recipe_change=lines[0] if lines else None,
    )


def weaker(quality: Quality) -> Iterator[str]:
    """Weaker promises than this quality, as lines of a recipe."""
    order: tuple[Quality, ...] = ("near-lossless", "good", "usable")
    for other in order[order.index(quality) + 1 :]:
        yield f'quality = "{other}"'
