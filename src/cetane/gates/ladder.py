"""The first shard of every kind, before the others are built.

A shard gets what the Hugging Face model computes before it, so that it is judged alone, and is
compared in every mode with what that model computes after it. What no module of that model gives,
such as keys and values that layers share, an earlier shard makes, which gets the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.session import gather
from cetane.families import Truth
from cetane.gates.golden import (
    Check,
    ShardScore,
    Watched,
    judge_shards,
    make_probes,
    shard_score,
    thresholds,
)
from cetane.gates.reference import Reference
from cetane.planner import Planner
from cetane.schema.interface import ToLogits, hidden_shape
from cetane.schema.recipe import Mode
from cetane.validation import Data


class LadderResult(Data):
    """How the first shard of every kind agrees with the model, fed with the model's own tensors."""

    passed: bool
    checks: tuple[Check, ...]
    shards: tuple[ShardScore, ...]


class Packages:
    """Packages of an unfinished bundle."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths

    def shard(self, name: str) -> Path:
        return self.paths[name]


def ladder(checkpoint: Checkpoint, planner: Planner, packages: dict[str, Path]) -> LadderResult:
    """Judge some finished shards, by name."""
    tables = host_tables(planner, checkpoint)
    plan = planner.plan()
    probe = make_probes(tables.embedding, checkpoint.tokenizer, plan)[-1]
    backend = PortableBackend(Packages(packages), "fp16")
    engine = Engine(plan, backend, tables, resident=False)
    rung = Rung(engine, planner, Reference(checkpoint), probe.tokens)
    scores = [score for shard in packages for score in rung.scores(shard)]
    checks = tuple(judge_shards(scores, thresholds(plan)))
    return LadderResult(
        passed=all(check.passed for check in checks), checks=checks, shards=tuple(scores)
    )


@dataclass(frozen=True)
class Pair:
    """A tensor that a shard hands on in a mode, `(n, C)`, and what it should be."""

    tensor: str
    truth: Truth
    mode: Mode
    found: Array
    wanted: Array


class Rung:
    """One probe, for shards that are judged alone."""

    def __init__(
        self, engine: Engine, planner: Planner, reference: Reference, tokens: tuple[int, ...]
    ) -> None:
        self.engine, self.planner, self.reference = engine, planner, reference
        self.tokens = tokens
        self.scale = planner.model.residual_scale or 1.0

    def scores(self, shard: str) -> Iterator[ShardScore]:
        """How a shard agrees in every mode."""
        for pair in self.pairs(shard, list(self.engine.plan.modes)):
            pairs = [(pair.found, pair.wanted)]
            yield shard_score(shard, pair.tensor, pair.truth, pair.mode, pairs)

    def pairs(self, shard: str, modes: list[Mode]) -> Iterator[Pair]:
        """What a shard makes of the model's own tensors, beside what the model makes of them."""
        feeds = self.planner.feeds(shard)
        if self.engine.plan.by_name[shard].kind == "head":
            # Any hidden state will do, so take one that does not need the whole model.
            layers = self.planner.model.layers
            feeds = {"hidden": next(t for b in layers if (t := b.truths().get("hidden")))}
        names = {
            truth: name.removesuffix("_out")
            for mode in modes
            for step, outputs in self.planner.truths(mode).items()
            if step.shard == shard
            for name, truth in outputs.items()
        }
        makers = {maker: self.planner.feeds(maker) for maker in self.all_makers(shard)}
        fed = {truth for some in (feeds, *makers.values()) for truth in some.values()}
        stored = self.reference.tensors(self.tokens, list({*fed, *names}))
        truths = {truth: rows * self.scale for truth, rows in stored.items()}
        slices = self.slices(shard)
        theirs = self.logits(shard, feeds, truths) if slices else None
        for mode in modes:
            watched = Watched(self.engine, self.planner, mode, self.tokens)
            for maker, supply in (*makers.items(), (shard, feeds)):
                watched.seen.clear()
                for running in watched.calls:
                    for name, truth in supply.items():
                        rows = truths[truth][running.call.positions]
                        running.tensors[name] = self.padded(rows, running.call.width)
                self.engine.run([(watched.session, watched.calls)], [maker])
            for truth, found in watched.tensors().items():
                yield Pair(names[truth], truth, mode, found, truths[truth])
            for start, stop in slices:
                logits = gather(watched.calls, "all")
                assert logits is not None and theirs is not None
                tokens = self.engine.plan.tokens(start, stop)
                found, wanted = logits[:, tokens], theirs[:, tokens]
                yield Pair("logits", ("lm_head", 0), mode, found, wanted)

    def all_makers(self, shard: str) -> list[str]:
        """The shards that must run before one, in order."""
        found: list[str] = []
        for maker in self.planner.makers(shard):
            found += [m for m in (*self.all_makers(maker), maker) if m not in found]
        return found

    def logits(self, shard: str, feeds: dict[str, Truth], truths: dict[Truth, Array]) -> Array:
        """The model's; from what a shard is fed, if it is a head and no more."""
        if self.engine.plan.by_name[shard].kind == "head":
            return self.reference.head(truths[feeds["hidden"]] / self.scale)
        return self.reference.run([self.tokens])[0].logits

    def slices(self, shard: str) -> set[tuple[int, int]]:
        """The rows of the head that a shard computes."""
        return {
            (item.sink.start, item.sink.stop)
            for function in self.engine.plan.by_name[shard].functions
            for item in function.outputs
            if isinstance(item.sink, ToLogits)
        }

    def padded(self, rows: Array, width: int) -> Array:
        """Rows `(n, C)` as a hidden tensor of a call."""
        wide = np.pad(rows, ((0, width - len(rows)), (0, 0))).T.astype(self.engine.backend.dtype)
        return wide.reshape(hidden_shape(self.engine.plan.recipe.tensor_layout, *wide.shape))
