"""The content of a bundle's page, from its manifest, its gates, an audit and given files."""

import shlex
from collections.abc import Iterator

from cetane.bundle import Bundle
from cetane.checkpoint.names import model_name
from cetane.evaluation.figures import Evaluation
from cetane.gates.golden_result import NEAR_LIMIT, GoldenResult
from cetane.gates.residency.measured import audit_for
from cetane.gates.residency.store import InBundle
from cetane.gates.scores import ShardScore
from cetane.hardware import LARGEST_FP16
from cetane.hardware.chips import Chip, find_chip
from cetane.mil import load
from cetane.report.call_times import call_times
from cetane.report.content.figures import (
    BlockRange,
    Perplexity,
    PositionRow,
    Positions,
    Ranges,
    Tasks,
)
from cetane.report.content.page import Absent, BundleReport, Fact
from cetane.report.content.speed import DraftBench
from cetane.report.content.sweep import SweepQuality
from cetane.report.content.verdicts import GateVerdict, OutcomeWord
from cetane.report.developers import for_developers
from cetane.report.device import on_device
from cetane.report.gate_results import GateResults, changed_at, command
from cetane.report.key_figures import key_figures
from cetane.report.placement import residency
from cetane.report.sizes import sizes
from cetane.report.verdicts import verdicts
from cetane.schema.changes import told_changes
from cetane.schema.manifest import MANIFEST

MOST_COLUMNS = 96
"""The most columns in the picture of positions; more would be too narrow for a phone."""


def bundle_report(
    bundle: Bundle,
    chip: Chip | None,
    model: str | None,
    quality: SweepQuality | None,
    speculation: DraftBench | None,
) -> BundleReport:
    """Everything that is known about a bundle. Missing sections name the command that makes them.
    `chip` is by default the measured one, else that of `Target`."""
    plan, manifest = bundle.plan, bundle.manifest
    artifact = InBundle(bundle)
    programs = {name: load(path) for name, path in artifact.packages.items()}
    named = None if chip is None else chip.id
    placed, unused = audit_for(named, None, programs, artifact.packages, artifact.measured())
    chip = chip or find_chip(placed.target.chip)
    gates = GateResults(bundle)
    judged = tuple(verdicts(gates, placed, unused))
    golden, disk = gates.golden, sizes(bundle, programs)
    path = shlex.quote(str(bundle.path))
    no_golden = Absent(why="The golden gate has not run.", command=command("golden", bundle.path))
    times, device = call_times(bundle, chip, model), on_device(gates)
    return BundleReport(
        title=model_name(manifest.source).rpartition("/")[2] or bundle.path.resolve().name,
        date=(gates.date("golden") or changed_at(bundle.path / MANIFEST))[:10],
        folder=bundle.path.resolve().name,
        architecture=plan.architecture,
        recipe=plan.recipe.name,
        outcome=overall(judged),
        figures=tuple(key_figures(bundle, gates, placed, disk, times, device)),
        verdicts=judged,
        residency=residency(plan, programs, placed),
        positions=positions(golden, path) if golden else no_golden,
        ranges=ranges(golden) if golden and golden.ranges else no_golden,
        sizes=disk,
        developers=for_developers(bundle, programs.values(), disk),
        perplexity=perplexity(gates),
        tasks=tasks(gates),
        quality=quality
        or Absent(
            why="No sweep was given.",
            command=f"cetane sweep {shlex.quote(manifest.source)} -o SWEEP, then --sweep SWEEP",
        ),
        speculation=speculation
        or Absent(
            why="No benchmark was given.",
            command=f"cetane bench {path} --json > bench.json, then --bench bench.json",
        ),
        predicted=times,
        device=device,
        provenance=tuple(provenance(bundle, gates)),
    )


def overall(judged: tuple[GateVerdict, ...]) -> OutcomeWord:
    """The verdict on the bundle.

    It fails if a gate that ran the programs failed. It passes if the golden gate passed, which
    judges the whole. Predictions decide nothing.
    """
    outcomes = {v.gate: v.outcome for v in judged if v.basis != "predicted"}
    return "failed" if "failed" in outcomes.values() else outcomes["golden"]


def positions(golden: GoldenResult, bundle: str) -> Positions | Absent:
    """The agreement of hidden states by position; old results lack it."""
    longest = max((len(score.by_position) for score in golden.shards), default=0)
    if not longest:
        return Absent(why="The golden gate ran before it kept positions.",
                      command=f"cetane validate {bundle}")  # fmt: skip
    width = -(-longest // MOST_COLUMNS)
    return Positions(
        per_column=width,
        positions=longest,
        rows=tuple(position_row(score, width) for score in golden.shards if score.by_position),
    )


def position_row(score: ShardScore, width: int) -> PositionRow:
    cosines = score.by_position
    worst = min(cosines)
    return PositionRow(
        shard=score.shard,
        tensor=score.tensor,
        mode=score.mode,
        cosine=score.cosine,
        worst=score.cosine_min,
        worst_at=cosines.index(worst) if worst < 1 else None,
        values=tuple(min(cosines[i : i + width]) for i in range(0, len(cosines), width)),
    )


def ranges(golden: GoldenResult) -> Ranges:
    """The largest magnitude of the residual stream after every block."""
    blocks = tuple(BlockRange(block=r.block, largest=r.largest) for r in golden.ranges)
    largest = max(blocks, key=lambda block: block.largest)
    return Ranges(
        end=LARGEST_FP16,
        near=NEAR_LIMIT,
        largest=largest,
        share=largest.largest / LARGEST_FP16,
        blocks=blocks,
    )


def perplexity(gates: GateResults) -> Perplexity | Absent:
    """The perplexities that `cetane validate --perplexity` kept."""
    kept = gates.perplexity
    if kept is None:
        return Absent(why="Perplexity has not been measured.",
                      command=command("perplexity", gates.bundle.path))  # fmt: skip
    quality, text = kept
    return Perplexity(
        text=text,
        tokens=quality.tokens,
        value=quality.perplexity,
        reference=quality.reference_perplexity,
        ratio=quality.ratio,
        limit=quality.limit,
        kl=quality.kl,
        top1=quality.top1,
    )


def tasks(gates: GateResults) -> Tasks | Absent:
    """The figures that `cetane eval` kept for the base, without an adapter."""
    kept = gates.read("evaluation", Evaluation)
    if kept is None:
        return Absent(why="No task has been run.",
                      command=command("evaluation", gates.bundle.path))  # fmt: skip
    compared = any(figure.reference is not None for figure in kept.figures)
    return Tasks(
        figures=kept.figures,
        limit=kept.limit,
        fewshot=kept.fewshot,
        chat=kept.chat,
        compared=compared,
        nats=kept.nats,
        warnings=kept.warnings,
    )


def provenance(bundle: Bundle, gates: GateResults) -> Iterator[Fact]:
    """The bundle's origin: its checkpoint, recipe, producers and gate runs."""
    manifest = bundle.manifest
    yield Fact(name="checkpoint", value=manifest.source)
    yield Fact(name="its fingerprint", value=manifest.fingerprint)
    if manifest.lora is not None:
        yield Fact(name="merged adapter", value=manifest.lora.source)
    for name, adapter in bundle.plan.adapters.items():
        own = sum(function.adapter == name for function in bundle.plan.functions.values())
        yield Fact(
            name=f"adapter {name}",
            value=f"{adapter.weight_bytes / 1e6:.1f} MB and {own} functions beside the shared "
            f"base, rank {adapter.rank}, from {manifest.adapters[name].source}",
        )
    yield Fact(name="recipe", value=bundle.plan.recipe.name)
    if bundle.plan.recipe.description:
        yield Fact(name="about the recipe", value=bundle.plan.recipe.description)
    if changed := told_changes(bundle.plan.recipe):
        yield Fact(name="values of its own", value=changed)
    yield Fact(name="bundle digest", value=bundle.digest)
    yield Fact(name="manifest written", value=changed_at(bundle.path / MANIFEST))
    for name, number in manifest.producer.items():
        yield Fact(name=f"made with {name}", value=number)
    for gate in gates.results:
        yield Fact(name=f"{gate} gate run", value=gates.date(gate) or "")
