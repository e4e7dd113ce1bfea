"""The first difference of a bundle from another, or from the Hugging Face model, down to the op.

Every shard gets the tensors of the correct side, so a shard's error does not look like the next
one's. Within a shard, `mil.compare` does the same with ops.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables, TokenRows
from cetane.checkpoint import Checkpoint
from cetane.compress import Selection
from cetane.engine.authored import AuthoredBackend
from cetane.engine.backend import Arrays, Backend
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend, ShardPaths
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates.ladder import Packages, all_makers, rungs
from cetane.gates.lost import with_blocks
from cetane.gates.probes import text_tokens
from cetane.lower.lower import Lowering
from cetane.mil import Program, load
from cetane.mil.compare import Comparer
from cetane.mil.comparison import DRIFT, Comparison, worst
from cetane.mil.executor import Executable
from cetane.mil.gap import Gap, gap
from cetane.mil.program import Precision
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode, Recipe, TokensSection

CALLS = 2
"""The number of compared calls: one with an empty cache, and one that reads the first's columns."""

Comparisons = dict[tuple[str, str], Comparison]
"""Comparisons, by shard and function."""


class ComparingBackend:
    """Runs the first packages, and compares the second packages with them, op by op, in every call.

    The first run in fp32, the second in `precision`.
    """

    name, by_rows = "comparing", False
    dtype: type[np.floating[Any]] = np.float32

    def __init__(self, first: ShardPaths, second: ShardPaths, precision: Precision) -> None:
        self.first, self.second, self.precision = first, second, precision
        self.comparisons: dict[tuple[str, str], list[Comparison]] = defaultdict(list)

    def open(self, shard: str) -> "ComparingProgram":
        first, second = self.first.shard(shard), self.second.shard(shard)
        program = load(first)
        other = program if second == first else load(second)
        return ComparingProgram(self, shard, program, other)

    def results(self, plan: Plan) -> Comparisons:
        """The worst of all calls, with the plan's names of blocks."""
        return {
            (shard, function): named(worst(comparisons), plan.by_name[shard].blocks)
            for (shard, function), comparisons in self.comparisons.items()
        }


class ComparingProgram:
    """One shard of both sides."""

    def __init__(
        self, backend: ComparingBackend, shard: str, first: Program, second: Program
    ) -> None:
        self.backend, self.shard, self.first, self.second = backend, shard, first, second
        self.comparers: dict[str, Comparer] = {}

    def comparer(self, function: str) -> Comparer:
        if function not in self.comparers:
            try:
                one, other = self.first.functions[function], self.second.functions[function]
                self.comparers[function] = Comparer(
                    Executable(one, "fp32"), Executable(other, self.backend.precision)
                )
            except KeyError:
                raise CetaneError(
                    f"{self.shard}: one side lacks the function {function}",
                    "compare bundles with the same modes, capacities and adapters",
                ) from None
            except CetaneError as error:
                raise CetaneError(f"{self.shard}: {error.message}", error.hint) from error
        return self.comparers[function]

    def make_state(self, function: str) -> Any:
        return self.comparer(function).first.make_state()

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        comparer = self.comparer(function)
        self.backend.comparisons[self.shard, function].append(comparer(inputs, state))
        return comparer.first(inputs, state)


def compare_bundles(
    first: Bundle, second: Bundle, mode: Mode, precision: Precision, progress: Progress
) -> tuple[Comparisons, dict[str, Gap]]:
    """Compare every shard of two bundles on the first bundle's tensors, and the tables' used rows.

    Every adapter and every capacity of the first bundle is compared. `precision` is the second
    bundle's. Raises CetaneError if the bundles differ in their shards, functions or tables.
    """
    names = [[shard.name for shard in bundle.plan.shards] for bundle in (first, second)]
    if names[0] != names[1]:
        raise CetaneError(
            f"the bundles are cut into different shards: {', '.join(names[0])} and "
            f"{', '.join(names[1])}",
            "build both with the same layout and head",
        )
    tokens = probe(first, mode)
    tables = dict(compare_tables(first.tables(), second.tables(), np.asarray(tokens)))
    backend = ComparingBackend(first, second, precision)
    plan = first.plan
    rounds = list(product((None, *plan.adapters), plan.capacities))
    steps = len(rounds) * len(names[0])
    for number, (adapter, capacity) in enumerate(rounds):
        one = plan.at(capacity.tokens).on(adapter)
        engine = Engine(one, backend, first.tables(), resident=False)
        session = engine.session([mode])
        calls = session.prepare(tokens, "all")
        for step, shard in enumerate(names[0], number * len(names[0])):
            progress(shard, step, steps)
            engine.run([(session, calls)], [shard])
    progress("done", steps, steps)
    return backend.results(plan), tables


def compare_tables(first: Tables, second: Tables, tokens: Any) -> Iterator[tuple[str, Gap]]:
    """The gaps of the rows of these tokens, in all tables, and of their positions' rotary rows."""
    one, other = by_token(first), by_token(second)
    shapes = [{name: rows.shape for name, rows in side.items()} for side in (one, other)]
    if shapes[0] != shapes[1] or first.rotary.keys() != second.rotary.keys():
        raise CetaneError(
            "the bundles' host tables differ in names or shapes",
            "compare bundles of one model, built with the same embedding.inside",
        )
    for name, rows in one.items():
        yield name, gap(rows[tokens], other[name][tokens])
    for name, table in first.rotary.items():
        sides = [side[:, : len(tokens)] for side in (table, second.rotary[name])]
        yield f"rotary {name}", gap(*sides)


def by_token(tables: Tables) -> dict[str, TokenRows]:
    """The tables with a row for each token, by the names that results show."""
    embedding = {} if tables.tokens is None else {"embedding": tables.tokens}
    return embedding | {f"table {name}": rows for name, rows in tables.others.items()}


def probe(bundle: Bundle, mode: Mode) -> tuple[int, ...]:
    """A text that fills `CALLS` calls, as far as the smallest capacity allows."""
    width, room = bundle.plan.modes[mode].tokens, bundle.plan.capacities[0].tokens
    calls = min(CALLS, room // width)
    return text_tokens(bundle.tokenizer, calls * width)


def named(comparison: Comparison, blocks: tuple[str, ...]) -> Comparison:
    """The comparison, with the plan's names of blocks in place of their numbers in the shard."""
    ops = tuple(replace(op, scope=with_blocks(op.scope, blocks)) for op in comparison.ops)
    return replace(comparison, ops=ops)


@dataclass(frozen=True)
class Handed:
    """An output of a shard that got the model's own tensors, compared with the model's output."""

    shard: str
    tensor: str
    gap: Gap


@dataclass(frozen=True)
class PortStage:
    """A step from the model to the finished package, and the shard's error after it."""

    name: str
    """A key of `STAGES`."""
    relative: float
    """The largest relative error of the shard's outputs."""


STAGES = {
    "authoring": "the torch module that is converted is not the model",
    "conversion": "the converter, or fp16 weights: the uncompressed program is not the module",
    "weights": "the bundle's weights: compression, or other weights than the checkpoint's",
    "fp16": "results that are rounded to fp16",
}
"""The cause of an error that first shows after a step."""


@dataclass(frozen=True)
class ModelDiff:
    """The difference of a bundle from the Hugging Face model."""

    handed: tuple[Handed, ...]
    suspect: str | None
    """The first shard beyond the tolerance."""
    stages: tuple[PortStage, ...] = ()
    """The stages of the suspect, in order."""
    cause: str | None = None
    """The first stage beyond the tolerance."""
    comparisons: Comparisons = field(default_factory=dict)
    """If the cause is weights or fp16, the ops of the suspect, and of shards whose keys and values
    it takes. Both sides differ only by that cause."""


class AgainstModel:
    """Compares a bundle with the Hugging Face model of a checkpoint, in one mode."""

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint, mode: Mode) -> None:
        self.bundle, self.checkpoint, self.mode = bundle, checkpoint, mode
        self.planner = Planner(checkpoint, bundle.plan.recipe)

    def run(self, tolerance: float, progress: Progress) -> ModelDiff:
        """Compare every shard; then stages and ops of the first shard beyond the tolerance."""
        shards = list(self.planner.members)
        steps = len(shards) + len(STAGES) + 1
        handed: list[Handed] = []
        finished = PortableBackend(self.bundle, "fp16")
        limit = DRIFT * tolerance  # against the model, a shard is only compared as a whole
        for number, shard in enumerate(shards):
            progress(shard, number, steps)
            handed += self.handed(shard, finished)
        suspect = next((h.shard for h in handed if h.gap.relative > limit), None)
        if suspect is None:
            progress("done", steps, steps)
            return ModelDiff(tuple(handed), None)
        with tempfile.TemporaryDirectory(prefix="cetane-diff-") as folder:
            progress(f"converting {suspect} without compression", len(shards), steps)
            needed = [*all_makers(self.planner, suspect), suspect]
            plain = Packages({shard: self.lower(shard, Path(folder)) for shard in needed})
            backends: dict[str, Backend] = {
                "authoring": AuthoredBackend(self.fresh_planner, self.checkpoint),
                "conversion": PortableBackend(plain),
                "weights": PortableBackend(self.bundle),
                "fp16": finished,
            }
            stages = []
            for number, (name, backend) in enumerate(backends.items()):
                progress(f"{suspect}, {name}", len(shards) + number, steps)
                errors = [h.gap.relative for h in self.handed(suspect, backend)]
                stages.append(PortStage(name, max(errors)))
            cause = next((s.name for s in stages if s.relative > limit), None)
            progress(f"{suspect}, op by op", steps - 1, steps)
            comparing = {
                "weights": ComparingBackend(plain, self.bundle, "fp32"),
                "fp16": ComparingBackend(self.bundle, self.bundle, "fp16"),
            }.get(cause or "")
            if comparing is not None:
                list(self.handed(suspect, comparing))
            progress("done", steps, steps)
            results = {} if comparing is None else comparing.results(self.bundle.plan)
        return ModelDiff(tuple(handed), suspect, tuple(stages), cause, results)

    def handed(self, shard: str, backend: Backend) -> Iterator[Handed]:
        """The outputs of a shard that a backend runs alone."""
        engine = Engine(self.bundle.plan, backend, self.bundle.tables(), resident=False)
        tokens = probe(self.bundle, self.mode)
        for rung in rungs(engine, self.planner, self.checkpoint, tokens):
            for pair in rung.pairs(shard, [self.mode]):
                yield Handed(shard, f"{rung.prefix}{pair.tensor}", gap(pair.wanted, pair.ours))

    @cached_property
    def fresh_planner(self) -> Planner:
        """A planner whose blocks may hold weights."""
        return Planner(self.checkpoint, self.bundle.plan.recipe)

    def lower(self, shard: str, folder: Path) -> Path:
        """The shard's function with fp16 weights."""
        target = folder / f"{shard}.mlpackage"
        recipe = uncompressed(self.bundle.plan.recipe, self.mode)
        Lowering(Planner(self.checkpoint, recipe), self.checkpoint).lower(shard, target)
        return target


def uncompressed(recipe: Recipe, mode: Mode) -> Recipe:
    """A recipe with fp16 weights. Of static shapes it keeps only this mode's and `decode`'s."""
    kept = {"decode", mode}
    tokens = recipe.tokens
    if tokens.shapes == "static":
        tokens = TokensSection(
            verify=tokens.verify if "verify" in kept else None,
            prefill=tokens.prefill if "prefill" in kept else None,
        )
    routed = tuple(m for m in recipe.layout.routed if m in kept)
    return recipe.model_copy(
        update={
            "compression": Selection(),
            "tokens": tokens,
            "layout": recipe.layout.model_copy(update={"routed": routed}),
        }
    )
