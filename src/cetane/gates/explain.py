"""A red golden gate in one sentence: what is wrong, where, and the change that mends it."""

from collections.abc import Iterator, Sequence
from math import ceil, log2
from typing import Any, Literal

import tomli_w
from pydantic import Field, computed_field

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.compress import parse_format
from cetane.engine.authored import AuthoredBackend, host_tables
from cetane.engine.engine import Engine
from cetane.gates.golden import GoldenResult
from cetane.gates.ladder import LadderResult
from cetane.gates.limits import limits
from cetane.gates.observe import Task, observe
from cetane.gates.probes import parts, structure_probes
from cetane.gates.reference import Reference
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.rule import load_rules
from cetane.gates.structure import Deviation, Truths, deviations, excess
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Quality, Recipe, key_path, value_of
from cetane.validation import Data

Cause = Literal[
    "weights", "authoring", "conversion", "contract", "fp16 range", "compression", "residency"
]
LARGEST = 32752.0
"""Half of the largest fp16: where a scaled residual stream should stay below."""
CHUNKS = 4
"""Of a layout that does not say how many (`planner/layout.py`)."""
BETTER = {
    4: "palette6-kmeans-group32",
    6: "int8-per-channel",
    8: "fp16",
}
"""The next format for bits that are too few."""


class Explanation(Data):
    """Why a port was refused."""

    cause: Cause
    where: str
    """The first shard, block or constant."""
    sentence: str
    changes: dict[str, Any] = Field(default_factory=dict)
    """Values of the recipe that mend it, by dotted key; none where no recipe can."""

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own order
    @property
    def recipe_change(self) -> str | None:
        """The same as lines of TOML, ready to paste."""
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


def explain(bundle: Bundle, checkpoint: Checkpoint, verdict: GoldenResult) -> Explanation | None:
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
        authored = authored_deviations(bundle, checkpoint)
        return wrong_graph(verdict, authored, recipe)
    if any(name.startswith("fp16") for name in red):
        return beyond_fp16(verdict, recipe, Planner(checkpoint, recipe))
    return too_compressed(verdict, recipe)


def wrong_weights(verdict: GoldenResult, plan: Plan) -> Explanation:
    """A constant that is not the checkpoint's, or a parameter that nothing uses."""
    if not verdict.wrong_weights:
        return Explanation(
            cause="authoring",
            where=verdict.unused[0].partition(":")[0],
            sentence=f"The port does not use all of the model: {verdict.unused[0]}.",
            changes=undone(plan.recipe),
        )
    first = verdict.wrong_weights[0]
    what = f"{first.parameter} ({first.label})" if first.parameter else first.label
    return Explanation(
        cause="weights",
        where=f"{first.shard}/{first.label}",
        sentence=f"The package {first.shard} holds other weights than the checkpoint: "
        f"{what}: {first.problem}. Port the model again with --rebuild.",
    )


def wrong_graph(verdict: GoldenResult, authored: list[Deviation], recipe: Recipe) -> Explanation:
    """The first tensor that is off; if the authored modules are right, the programs are not."""
    if verdict.epsilons:
        return Explanation(
            cause="authoring",
            where=verdict.epsilons[0].partition(":")[0],
            sentence=f"A norm is not the model's: {verdict.epsilons[0]}.",
        )
    first = first_off(verdict.structure)
    assert first is not None
    before = first_off(authored)
    modes = {one.mode for one in verdict.structure if one.shard == first.shard}
    off = {one.mode for one in verdict.structure if off_limit(one)}
    where = f"{first.shard}, after {first.truth}"
    what = (
        f"On the checkpoint's own weights, {first.tensor} of {first.shard} errs by "
        f"{first.relative:.2g} after {first.truth} ({first.mode}, {first.probe}, position "
        f"{first.position})"
    )
    if before is None:
        return Explanation(
            cause="conversion",
            where=where,
            sentence=f"{what}; the authored modules are right, so conversion "
            "changed the program. Run cetane diff BUNDLE --model CHECKPOINT.",
        )
    if off < modes:
        return Explanation(
            cause="contract",
            where=where,
            sentence=f"{what}; only {', '.join(sorted(off))} is wrong, so a cache "
            "or a mask of that mode is.",
            changes={"cache.contract": "readonly"},
        )
    return Explanation(
        cause="authoring",
        where=where,
        sentence=f"{what}; the authored module is not the model.",
        changes=undone(recipe),
    )


def off_limit(one: Deviation) -> bool:
    return excess(one) > limits().structure.relative


def first_off(found: Sequence[Deviation]) -> Deviation | None:
    """The first tensor beyond its limit, in the order of the shards."""
    return next((one for one in found if off_limit(one)), None)


def undone(recipe: Recipe) -> dict[str, Any]:
    """What takes back a recipe's request that is not the model's."""
    if recipe.family.get("departures"):
        return {"family.departures": []}
    return {"family.full_window": 0} if recipe.family.get("full_window") else {}


def authored_deviations(bundle: Bundle, checkpoint: Checkpoint) -> list[Deviation]:
    """The authored modules, before any conversion, against the model."""
    planner, plan = Planner(checkpoint, bundle.plan.recipe), bundle.plan
    tables = host_tables(planner, checkpoint)
    engine = Engine(plan, AuthoredBackend(planner, checkpoint), tables, resident=False)
    probes = structure_probes(tables.embedding, bundle.tokenizer, plan)
    tasks = [
        Task(mode, probe, parts(plan, mode, len(probe.tokens)))
        for mode in plan.modes
        for probe in probes
    ]
    seen = observe(engine, planner, tasks)
    scale = planner.model.residual_scale or 1.0
    truths = Truths.ask(Reference(checkpoint), tasks, seen, scale=scale)
    return list(deviations(plan, planner, tasks, seen, truths))


def beyond_fp16(verdict: GoldenResult, recipe: Recipe, planner: Planner) -> Explanation:
    """Results that rounding spoils, and the power of two that brings the stream inside."""
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
        changes={"family.residual_scale": power},
    )


def too_compressed(verdict: GoldenResult, recipe: Recipe) -> Explanation:
    """The quality that was promised is not kept."""
    worst = min(verdict.shards, key=lambda one: one.cosine, default=None)
    failed = [check for check in verdict.checks if not check.passed]
    first = failed[0]
    undecided = all(check.interval is not None and not check.decided for check in failed)
    tail = (
        f" After {verdict.positions} positions the interval still holds the limit, so it is not "
        "proven."
        if undecided
        else ""
    )
    key, form = fewest_bits(recipe)
    better = next((other for most, other in BETTER.items() if parse_format(form).bits <= most), "")
    return Explanation(
        cause="compression",
        where=worst.shard if worst else "",
        sentence=f"Weights and graph are right; compression ({form}) costs "
        f"more than {recipe.quality!r} allows: {first.name.partition(': ')[2]} is "
        f"{first.value:.3g}, the limit {first.limit:g}.{tail}",
        changes={key: better} if better else dict(weaker(recipe.quality)),
    )


def fewest_bits(recipe: Recipe) -> tuple[str, str]:
    """The smallest format of a recipe, by the key that asks for it."""
    rules = recipe.compression
    formats = {
        "compression.default": rules.default,
        **{f"compression.types.{kind}": form for kind, form in rules.types.items()},
        **{f'compression.names."{name}"': form for name, form in rules.names.items()},
    }
    return min(formats.items(), key=lambda item: parse_format(item[1]).bits)


def weaker(quality: Quality) -> Iterator[tuple[str, Quality]]:
    """The next promise that asks less."""
    order: tuple[Quality, ...] = ("near-lossless", "good", "usable")
    for other in order[order.index(quality) + 1 :][:1]:
        yield "quality", other


def explain_ladder(verdict: LadderResult, recipe: Recipe) -> Explanation:
    """Why the first shards of every kind were refused."""
    first = next(check for check in verdict.checks if not check.passed)
    if verdict.wrong_weights:
        wrong = verdict.wrong_weights[0]
        return Explanation(
            cause="weights",
            where=f"{wrong.shard}/{wrong.label}",
            sentence=f"The package {wrong.shard} holds other weights than the checkpoint: "
            f"{wrong.parameter or wrong.label}: {wrong.problem}. Port the model again with "
            "--rebuild.",
        )
    return Explanation(
        cause="authoring",
        where=first.name.rpartition(" of ")[2],
        sentence=f"On the checkpoint's own weights and tensors, {first.name} errs by "
        f"{first.value:.2g}, the limit {first.limit:g}.",
        changes=undone(recipe),
    )


def explain_residency(audited: Audit, recipe: Recipe) -> Explanation:
    """Why programs would not run on the ANE: the first finding that refuses them, and its mend."""
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
        changes=mended(first.rule, recipe),
    )


def mended(rule: str, recipe: Recipe) -> dict[str, Any]:
    """The change of a recipe that a rule of residency asks for, where there is one."""
    known = load_rules().get(rule)
    changes = {} if known is None else dict(known.changes)
    if changes.get("layout.chunks") == "more":
        layout = recipe.layout
        if layout.kind not in ("chunks", "single") or layout.cuts:
            return {}
        changes |= {"layout.kind": "chunks", "layout.chunks": 2 * (layout.chunks or CHUNKS)}
    if "cache.contract" in changes:
        changes |= {"cache.padded": False, "cache.state_heads": 1}
        if recipe.cache.sliding is not None:
            changes["cache.sliding"] = changes["cache.contract"]
    return {k: v for k, v in changes.items() if value_of(recipe, k) != v}
