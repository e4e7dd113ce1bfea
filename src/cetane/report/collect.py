"""The content of a bundle's page: from its manifest, its gates, an audit, and what is given."""

import shlex
from collections.abc import Iterator

from cetane.bundle import Bundle
from cetane.gates.golden import NEAR_LIMIT, GoldenResult
from cetane.gates.residency.audit import audit
from cetane.gates.residency.measured import with_measured
from cetane.gates.residency.store import InBundle
from cetane.gates.residency.target import DEFAULT_OS, Target
from cetane.gates.scores import ShardScore
from cetane.hardware.chips import Chip
from cetane.mil.program import LARGEST_FP16
from cetane.mil.reader import load
from cetane.report.content import (
    Absent,
    BlockRange,
    BundleReport,
    Fact,
    Figure,
    Outcome,
    Perplexity,
    PositionRow,
    Positions,
    Predicted,
    Quality,
    Ranges,
    Sizes,
    Speculation,
    Verdict,
)
from cetane.report.placement import residency
from cetane.report.predicted import predicted
from cetane.report.sizes import sizes
from cetane.report.verdicts import Gates, command, verdicts, written
from cetane.schema.manifest import MANIFEST

WIDEST = 96
"""Columns of the picture of positions; more would be narrower than a phone can show."""


def bundle_report(
    bundle: Bundle,
    chip: Chip,
    model: str | None,
    quality: Quality | None,
    speculation: Speculation | None,
) -> BundleReport:
    """Everything known of a bundle; what is not says which command makes it."""
    plan, manifest = bundle.plan, bundle.manifest
    artifact = InBundle(bundle)
    programs = {name: load(path) for name, path in artifact.packages.items()}
    placed = audit(programs, Target(chip.id, DEFAULT_OS))
    if (measured := artifact.measured()) is not None:
        placed = with_measured(placed, measured, artifact.packages)
    gates = Gates(bundle)
    judged = tuple(verdicts(gates, placed))
    path = shlex.quote(str(bundle.path))
    golden, found = gates.golden, sizes(bundle, programs)
    no_golden = Absent(why="The golden gate has not run.", command=command("golden", bundle.path))
    predictions = predicted(bundle, chip, model)
    return BundleReport(
        title=bundle.path.resolve().name,
        subtitle=f"{plan.architecture}, recipe {plan.recipe.name}",
        outcome=overall(judged),
        head=tuple(head(bundle, found, predictions, golden)),
        verdicts=judged,
        residency=residency(plan, programs, placed),
        positions=positions(golden, path) if golden else no_golden,
        ranges=ranges(golden) if golden and golden.ranges else no_golden,
        sizes=found,
        perplexity=perplexity(gates),
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
        predicted=predictions,
        provenance=tuple(provenance(bundle, gates)),
    )


def overall(judged: tuple[Verdict, ...]) -> Outcome:
    """Failed if a gate that ran the programs failed; passed if the golden gate did, which judges
    the whole. What is predicted decides nothing."""
    outcomes = {v.gate: v.outcome for v in judged if v.basis != "predicted"}
    return "failed" if "failed" in outcomes.values() else outcomes["golden"]


def head(
    bundle: Bundle, found: Sizes, predictions: Predicted | Absent, golden: GoldenResult | None
) -> Iterator[Figure]:
    """The figures that a reader wants first."""
    yield Figure(name="on disk", value=found.bytes / 1e6, unit="MB")
    yield Figure(name="bits per weight", value=found.mean_bits, unit="bits",
                 note=f"{bundle.plan.layers} layers")  # fmt: skip
    if isinstance(predictions, Predicted):
        decode = predictions.modes[0]
        yield Figure(name="decoding", value=decode.tok_s, unit="tokens/s",
                     note=f"predicted, {predictions.chip}")  # fmt: skip
    if golden and golden.logits:
        top1 = min(score.top1 for score in golden.logits)
        yield Figure(name="same first choice", value=100 * top1, unit="%",
                     note="of all probed positions, worst mode")  # fmt: skip


def positions(golden: GoldenResult, bundle: str) -> Positions | Absent:
    """What shards hand on, by position; old results lack it."""
    longest = max((len(score.by_position) for score in golden.shards), default=0)
    if not longest:
        return Absent(why="The golden gate ran before it kept positions.",
                      command=f"cetane validate {bundle}")  # fmt: skip
    width = -(-longest // WIDEST)
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
    """The residual stream of every block."""
    blocks = tuple(BlockRange(block=r.block, largest=r.largest) for r in golden.ranges)
    largest = max(blocks, key=lambda found: found.largest)
    return Ranges(
        end=LARGEST_FP16,
        near=NEAR_LIMIT,
        largest=largest,
        share=largest.largest / LARGEST_FP16,
        blocks=blocks,
    )


def perplexity(gates: Gates) -> Perplexity | Absent:
    found = gates.perplexity
    if found is None:
        return Absent(why="Perplexity has not been measured.",
                      command=command("perplexity", gates.bundle.path))  # fmt: skip
    quality, text = found
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


def provenance(bundle: Bundle, gates: Gates) -> Iterator[Fact]:
    """Where the bundle is from."""
    manifest = bundle.manifest
    yield Fact(name="checkpoint", value=manifest.source)
    yield Fact(name="its fingerprint", value=manifest.fingerprint)
    yield Fact(name="recipe", value=bundle.plan.recipe.name)
    if bundle.plan.recipe.description:
        yield Fact(name="about the recipe", value=bundle.plan.recipe.description)
    yield Fact(name="bundle digest", value=bundle.digest)
    yield Fact(name="manifest written", value=written(bundle.path / MANIFEST))
    for name, number in manifest.producer.items():
        yield Fact(name=f"made with {name}", value=number)
    for gate in gates.results:
        yield Fact(name=f"{gate} gate run", value=gates.date(gate) or "")
