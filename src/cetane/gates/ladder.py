"""The ladder: judges the first shard of every kind, before the others are built.

A shard is judged alone, in every mode. It gets the tensors that the Hugging Face model computes
before it, and its outputs are compared with the model's. Some inputs come from no module of that
model, such as keys and values that layers share. An earlier shard makes these, from the model's
tensors. The shard runs on the checkpoint's own values, in fp32, so compression hides no wrong
graph.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.session import gather
from cetane.families import Truth
from cetane.gates import metrics
from cetane.gates.bases import base_checks
from cetane.gates.experts import Choices
from cetane.gates.heads import head_slices
from cetane.gates.lost import LostNumbers, first_lost, seeking
from cetane.gates.observe import ProbeTask, Watched
from cetane.gates.port import Packaged
from cetane.gates.probes import LEAST_OWN, TEXT_PROBE, Probe, ProbePart, text_tokens, widest_tokens
from cetane.gates.reference import Reference, reference_of
from cetane.gates.scores import ShardScore, shard_score
from cetane.gates.structure import LOGITS, Deviation, deviation, judge_structure
from cetane.gates.verdict import Check, at_most
from cetane.gates.weights import LISTED, WrongWeight, wrong_constants
from cetane.planner import Planner
from cetane.planner.weights import refuse_damaged
from cetane.schema.interface import hidden_shape
from cetane.schema.recipe import Mode
from cetane.validation import Data


class LadderResult(Data):
    """The agreement of the first shard of every kind with the model, on the model's own tensors."""

    passed: bool
    checks: tuple[Check, ...]
    shards: tuple[ShardScore, ...]
    wrong_weights: tuple[WrongWeight, ...] = ()
    structure: tuple[Deviation, ...] = ()
    """Older results have none."""
    lost: LostNumbers | None = None
    """Where infinity or NaN first comes from, if an output has some."""


class Packages:
    """Packages of an unfinished bundle."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths

    def shard(self, name: str) -> Path:
        return self.paths[name]


def ladder(checkpoint: Checkpoint, planner: Planner, packages: dict[str, Path]) -> LadderResult:
    """Judge finished shards; `packages` are their paths by name."""
    tables = host_tables(planner, checkpoint)
    port = Packaged(Packages(packages), planner, checkpoint, tables, checkpoint.tokenizer)
    judged = [*climb(port.twin, planner, checkpoint, packages)]
    scores, rows = [score for score, _ in judged], [row for _, row in judged]
    lost = next((row.shard for row in rows if row.lost), None)
    wrong = [w for shard in packages for w in wrong_constants(port, checkpoint, shard)]
    checks = (
        *base_checks(checkpoint),
        at_most("wrong constants", float(len(wrong)), 0),
        *judge_structure(rows, question=""),
    )
    return LadderResult(
        passed=all(check.passed for check in checks),
        checks=checks,
        shards=tuple(scores),
        wrong_weights=tuple(wrong[:LISTED]),
        structure=tuple(rows),
        lost=None if lost is None else lost_by(port, checkpoint, lost),
    )


def lost_by(port: Packaged, checkpoint: Checkpoint, shard: str) -> LostNumbers | None:
    """Where the twin of a shard first gives infinity or NaN."""
    sought = seeking(port.twin, "fp32")
    return first_lost(lambda: list(climb(sought, port.planner, checkpoint, [shard])))


def climb(
    engine: Engine, planner: Planner, checkpoint: Checkpoint, shards: Collection[str]
) -> Iterator[tuple[ShardScore, Deviation]]:
    """Every output of some shards in every mode: its score, and its deviation from the model.

    Raises CetaneError for a weight with NaN or infinity that the model's tensors show.
    """
    plan = engine.plan
    widest, context = widest_tokens(plan), plan.capacities[0].tokens
    tokens = text_tokens(checkpoint.tokenizer, min(context, widest + widest // 8 + LEAST_OWN))
    for rung in rungs(engine, planner, checkpoint, tokens):
        for shard in shards:
            for pair in rung.pairs(shard, list(plan.modes)):
                if not np.isfinite(pair.wanted).all():  # a damaged model, rather than a wrong graph
                    refuse_damaged(checkpoint, planner.model, planner.blocks)
                tensor, both = f"{rung.prefix}{pair.tensor}", (pair.ours, pair.wanted)
                score = shard_score(shard, tensor, pair.truth, pair.mode, [both])
                errors = metrics.relative(*both)
                task = rung.task(pair.mode)
                yield score, deviation(shard, tensor, pair.truth, task, pair.at, errors)


def of_choices(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Comparable logits `(n, 2)` of both sides, from `(n, V)` of a head that gives only choices.

    Ours are the choice's logit, twice. Theirs are the model's logits of the chosen token and of the
    best one."""
    rows, chosen = np.arange(len(ours)), ours.argmax(1)
    own = ours[rows, chosen]
    return np.stack([own, own], 1), np.stack([theirs[rows, chosen], theirs.max(1)], 1)


@dataclass(frozen=True)
class Pair:
    """An output of a shard in a mode, and the model's tensor: both `(n, C)`."""

    tensor: str
    truth: Truth
    mode: Mode
    at: Array
    """The numbers of the tokens, `(n,)`."""
    ours: Array
    wanted: Array


class Rung:
    """One probe, for shards that are judged alone."""

    def __init__(
        self, engine: Engine, planner: Planner, reference: Reference, tokens: tuple[int, ...]
    ) -> None:
        self.engine, self.planner, self.reference = engine, planner, reference
        self.tokens = tokens
        self.scale = planner.model.residual_scale or 1.0

    @property
    def prefix(self) -> str:
        """The words before a tensor's name: the adapter, and the capacity if there are several."""
        adapter, plan = self.planner.adapter, self.engine.plan
        told = "" if adapter is None else f"{adapter}: "
        return told + (f"at {plan.recipe.cache.context}: " if self.planner.smaller else "")

    def task(self, mode: Mode) -> ProbeTask:
        """The tokens, all taken by one mode."""
        probe = Probe(TEXT_PROBE, self.tokens)
        return ProbeTask(mode, probe, (ProbePart(mode, len(self.tokens)),))

    def pairs(self, shard: str, modes: list[Mode]) -> Iterator[Pair]:
        """The outputs of a shard that got the model's own tensors, with their truths.

        There are none if the shard has no functions of its own for the adapter."""
        adapter = self.planner.adapter
        if adapter is not None and not self.planner.variants.changed_by(shard, adapter):
            return
        names = {
            truth: name.removesuffix("_out")
            for mode in modes
            for step, outputs in self.planner.truths(mode).items()
            if step.shard == shard
            for name, truth in outputs.items()
        }
        feeds = self.feeds(shard)
        fed = {truth for own in feeds.values() for truth in own.values()}
        truths = self.truths([*{*fed, *names}])
        slices = head_slices(self.engine.plan.by_name[shard].functions)
        theirs = self.logits(shard, feeds[shard], truths) if slices else None
        for mode, watched in self.run(modes, feeds, truths).items():
            wanted, choices = truths, watched.choices()
            if choices:  # in the shard's own layers, so its inputs stay
                wanted = self.truths([*names], choices)
                theirs = self.logits(shard, feeds[shard], truths, choices) if slices else None
            for truth, (at, rows) in watched.tensors().items():
                yield Pair(names[truth], truth, mode, at, rows, wanted[truth][at])
            for start, stop in slices:
                logits = gather(watched.calls, "all")
                assert logits is not None and theirs is not None
                tokens = self.engine.plan.tokens(start, stop)
                compared = logits[:, tokens], theirs[:, tokens]
                if self.engine.plan.recipe.head.choose:
                    compared = of_choices(*compared)
                yield Pair("logits", LOGITS, mode, np.arange(len(logits)), *compared)

    def truths(self, wanted: Sequence[Truth], choices: Choices | None = None) -> dict[Truth, Array]:
        """Tensors of the model, as the port scales them; `choices` as in `Reference.run`."""
        stored = self.reference.tensors(self.tokens, wanted, choices)
        return {truth: rows * self.scale for truth, rows in stored.items()}

    def feeds(self, shard: str) -> dict[str, dict[str, Truth]]:
        """The model's tensors for each input, by shard: first the shards that must run before this
        one, in order, then the shard itself."""
        own = self.planner.feeds(shard)
        if self.engine.plan.by_name[shard].kind == "head":
            # Any hidden state suffices, so take one that does not need the whole model.
            layers = self.planner.model.layers
            own = {"hidden": next(t for b in layers if (t := b.truths().get("hidden")))}
        before = {maker: self.planner.feeds(maker) for maker in all_makers(self.planner, shard)}
        return before | {shard: own}

    def run(
        self,
        modes: list[Mode],
        feeds: dict[str, dict[str, Truth]],
        truths: dict[Truth, Array],
    ) -> dict[Mode, Watched]:
        """Run shards on the model's tensors, each opened once for all modes. What the last one
        computed is seen, by mode."""
        every = {mode: Watched(self.engine, self.planner, self.task(mode)) for mode in modes}
        for shard, supply in feeds.items():
            for watched in every.values():
                watched.forget()
                for running in watched.calls:
                    for name, truth in supply.items():
                        rows = truths[truth][running.call.positions]
                        running.tensors[name] = self.padded(rows, running.call.width)
            self.engine.run(
                [(watched.session, watched.calls) for watched in every.values()], [shard]
            )
        return every

    def logits(
        self,
        shard: str,
        feeds: dict[str, Truth],
        truths: dict[Truth, Array],
        choices: Choices | None = None,
    ) -> Array:
        """The model's logits `(n, V)`, from the shard's own inputs if the shard is only a head."""
        if self.engine.plan.by_name[shard].kind == "head":
            norm = self.planner.model.norm.removesuffix(".weight")
            return self.reference.head(truths[feeds["hidden"]] / self.scale, norm)
        return self.reference.run([self.tokens], choices=[choices or {}])[0].logits

    def padded(self, rows: Array, width: int) -> Array:
        """Rows `(n, C)` as the hidden tensor of a call with `width` columns."""
        wide = np.pad(rows, ((0, width - len(rows)), (0, 0))).T.astype(self.engine.backend.dtype)
        return wide.reshape(hidden_shape(self.engine.plan.recipe.tensor_layout, *wide.shape))


def all_makers(planner: Planner, shard: str) -> list[str]:
    """The shards that must run before this one, in order."""
    makers: list[str] = []
    for maker in planner.makers(shard):
        makers += [m for m in (*all_makers(planner, maker), maker) if m not in makers]
    return makers


def rungs(
    engine: Engine, planner: Planner, checkpoint: Checkpoint, tokens: tuple[int, ...]
) -> Iterator[Rung]:
    """A rung for the base and for every adapter, at every capacity: each has functions of its own.

    A smaller capacity takes as many of the tokens as it holds.
    """
    for adapter, capacity in product((None, *planner.adapters), engine.plan.capacities):
        plan = engine.plan.at(capacity.tokens).on(adapter)
        own = Engine(plan, engine.backend, engine.tables, resident=False)
        reference = reference_of(checkpoint, adapter)
        yield Rung(own, planner.on(adapter), reference, tokens[: capacity.tokens])
