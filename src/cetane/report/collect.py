"""The content of a bundle's page: from its manifest, its gates, an audit, and what is given."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from cetane.bundle import MANIFEST, Bundle, shard_path
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.golden import NEAR_LIMIT, GoldenResult, ShardScore
from cetane.gates.residency.audit import audit
from cetane.gates.residency.chips import DEFAULT_OS, Target
from cetane.gates.residency.graph import Graph
from cetane.gates.residency.measured import with_measured
from cetane.gates.residency.store import InBundle
from cetane.mil.program import LARGEST_FP16, Program
from cetane.mil.reader import load
from cetane.perf.chips import Chip
from cetane.perf.cost import TERM_OF
from cetane.perf.predict import Prediction, Predictor
from cetane.perf.sweep import CONTEXTS
from cetane.plan import Planner, Route, ShardPlan
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
    PredictedStep,
    Quality,
    Ranges,
    ShardSize,
    Sizes,
    Speculation,
    Verdict,
)
from cetane.report.placement import residency
from cetane.report.verdicts import Gates, command, verdicts, written

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
            command=f"cetane sweep {shlex.quote(manifest.source)} --json > sweep.json, "
            "then --sweep sweep.json",
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


def sizes(bundle: Bundle, programs: Mapping[str, Program]) -> Sizes:
    """Bytes on disk: shards, and what the host keeps."""
    parts: dict[str, int] = {shard_path(shard.name): 0 for shard in bundle.plan.shards}
    for name, record in bundle.manifest.files.items():
        top = "/".join(name.split("/")[: 2 if name.startswith("shards/") else 1])
        parts[top] = parts.get(top, 0) + record.bytes
    weights = {
        shard_path(shard.name): stored(bundle, shard, programs[shard.name])
        for shard in bundle.plan.shards
    }
    largest = max(parts.values())
    return Sizes(
        bytes=sum(parts.values()),
        weights=sum(count for count, _ in weights.values()),
        mean_bits=bundle.plan.mean_bits,
        parts=tuple(
            ShardSize(
                name=name.removeprefix("shards/").removesuffix(".mlpackage"),
                bytes=count,
                share=count / largest,
                weights=weights[name][0] if name in weights else None,
                bits=8 * weights[name][1] / weights[name][0] if weights.get(name, (0,))[0] else None,
            )
            for name, count in parts.items()
        ),
        caches=dict(bundle.plan.kv_bytes),
    )


def stored(bundle: Bundle, shard: ShardPlan, program: Program) -> tuple[int, int]:
    """Elements and bytes of a shard's weights, as the functions of one mode hold them."""
    elements = nbytes = 0
    for step in bundle.plan.modes["decode"].steps:
        if step.shard == shard.name:
            experts = [names[0] for names in step.experts] if isinstance(step, Route) else None
            for name in experts or [step.function]:  # type: ignore[union-attr]
                graph = Graph(program.functions[name], Target())
                elements += sum(weight.elements for weight in graph.weights.values())
                nbytes += graph.constant_bytes
    return elements, nbytes


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


def predicted(bundle: Bundle, chip: Chip, model: str | None) -> Predicted | Absent:
    """Milliseconds by the cost model, which needs the checkpoint's shapes.

    A hub id is downloaded only if it is asked for.
    """
    source = model or bundle.manifest.source
    if model is None and not Path(source).exists():
        return Absent(
            why=f"The checkpoint {source} is not on this machine, and predictions need its shapes.",
            command=f"cetane report {shlex.quote(str(bundle.path))} --model CHECKPOINT",
        )
    checkpoint = same(open_checkpoint(source), bundle)
    planner, predictor = Planner(checkpoint, bundle.plan.recipe), Predictor(chip)
    flexible = bundle.plan.recipe.tokens.shapes == "range"  # the ANE runs only the default shape
    modes = [
        step(predictor.predict(planner, mode))
        for mode, tokens in planner.recipe.tokens.by_mode().items()
        if not (flexible and tokens > 1)
    ]
    contexts = sorted({planner.recipe.cache.context, *CONTEXTS})
    errors = predictor.fit.errors
    return Predicted(
        chip=chip.name,
        longest=max(one.high or one.ms for one in modes),
        terms=tuple(dict.fromkeys(TERM_OF.values())),
        modes=tuple(modes),
        contexts=tuple(
            step(predictor.predict(planner, "decode", context))
            for context in contexts
            if context <= planner.model.max_context
        ),
        within=errors.share if chip.devices else None,
        steps=errors.rows,
        median=errors.median if chip.devices else None,
    )


def same(checkpoint: Checkpoint, bundle: Bundle) -> Checkpoint:
    """CetaneError for another checkpoint than the bundle's: it might have other shapes."""
    if checkpoint.fingerprint != bundle.manifest.fingerprint:
        raise CetaneError(
            f"{checkpoint.source} is not the checkpoint that {bundle.path} was made from",
            "--model names the right one",
        )
    return checkpoint


def step(found: Prediction) -> PredictedStep:
    return PredictedStep(
        mode=found.mode,
        tokens=found.tokens,
        context=found.context,
        ms=found.ms,
        low=found.low,
        high=found.high,
        tok_s=found.tok_s,
        binds=found.binds,
        terms={term: ms for term, ms in found.terms.items() if ms > 0},
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
