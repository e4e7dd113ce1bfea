"""Observations of a port: its logits and its shards' outputs, on probes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import Running, columns
from cetane.engine.engine import Engine
from cetane.engine.host import host_input
from cetane.engine.session import Session, gather
from cetane.families import Truth
from cetane.gates.experts import Choices, best, routed_blocks
from cetane.gates.probes import Probe, ProbePart
from cetane.gates.reference import Observed
from cetane.planner import Planner
from cetane.schema.function import Route, Step
from cetane.schema.interface import Embedding
from cetane.schema.recipe import Mode


@dataclass(frozen=True)
class ProbeTask:
    """A probe, the mode that it judges, and the modes that take its tokens."""

    mode: Mode
    probe: Probe
    parts: tuple[ProbePart, ...]


@dataclass(frozen=True)
class Seen:
    """A port's results on a probe: logits `(n, V)` and tensors `(n, C)`.

    The logits are of the tokens with the numbers `at`.
    """

    logits: Array
    at: Array
    tensors: dict[Truth, tuple[Array, Array]]
    """Each tensor's numbers of tokens, and their rows."""
    choices: Choices = field(default_factory=dict)
    """The experts of the tokens, as far as the port shows them."""

    def whole(self, count: int) -> Observed:
        """The logits, and the tensors that have all `count` tokens, in the form of the truth."""
        full = {truth: rows for truth, (at, rows) in self.tensors.items() if len(at) == count}
        return Observed(self.logits, full)


def observe(
    engine: Engine, planner: Planner, tasks: Sequence[ProbeTask], after: Session | None = None
) -> list[Seen]:
    """The port's results on every task. Every shard opens once.

    With `after`, every sequence goes on from that session's caches.
    """
    watched = [Watched(engine, planner, task, after) for task in tasks]
    engine.run([(w.session, w.calls) for w in watched], last=True)
    return [w.result() for w in watched]


def unrun(engine: Engine, adapter: str | None) -> list[str]:
    """The functions of the base, or of an adapter, that no call of an engine has run."""
    return [
        "/".join(key)
        for key, function in engine.plan.functions.items()
        if function.adapter == adapter and key not in engine.shards.times
    ]


class Watched:
    """A sequence that runs through the shards, and their outputs.

    Where a mode's calls cannot be padded, single-token calls take the tokens that fill no call.
    """

    def __init__(
        self, engine: Engine, planner: Planner, task: ProbeTask, after: Session | None = None
    ) -> None:
        """`after` is a session of the same plan, perhaps on another backend, from which the
        sequence goes on."""
        self.engine = engine
        self.session = engine.session(watch=[self.keep], start=task.probe.start)
        if after is not None:
            self.session.take(after)
        self.start = self.session.position
        used: list[Mode] = [task.mode, *(part.mode for part in task.parts), "decode"]
        self.truths = {
            step: truths
            for mode in dict.fromkeys(used)
            for step, truths in planner.truths(mode).items()
        }
        """By step, the truths of its outputs. Steps that only fill caches have none: later tokens
        show their errors."""
        self.seen: dict[Truth, list[Array]] = {}
        self.channels = planner.model.channels
        self.routed = routed_blocks(planner.model.layers)
        """The blocks with experts, by the names of what the port shows of them."""
        self.experts: dict[str, list[Array]] = {}
        """The chosen experts of each call, by these names."""
        self.choosing: dict[str, set[Step | Route]] = {}
        """The steps that show them: calls that only fill caches may leave a layer's experts out."""
        ids, at = task.probe.tokens, 0
        self.calls: list[Running] = []
        for part in task.parts:
            modes = dict.fromkeys((part.mode, "decode"))
            wanted = ids[at : at + part.tokens]
            self.calls += self.session.prepare(wanted, "all" if part.judged else "none", modes)
            at += part.tokens
        if task.probe.scale != 1:
            self._scale(task.probe.scale)

    def _scale(self, scale: float) -> None:
        """Give the calls embeddings that are `scale` times the table's."""
        inputs = {
            item.name: item
            for function in self.engine.plan.functions.values()
            for item in function.inputs
            if item.source == Embedding()
        }
        tables, dtype = self.engine.tables, self.engine.backend.dtype
        for running in self.calls:
            for name, item in inputs.items():
                rows = host_input(item, running.call, tables, dtype)
                running.hosted[name] = (rows * scale).astype(dtype)

    def keep(self, step: Step | Route, name: str, value: Array, tokens: int) -> None:
        block = self.routed.get(name)
        if block is not None and value.shape[1:2] == (self.channels[block.scores],):
            scores = columns(value)[:, :tokens]
            self.experts.setdefault(name, []).append(best(scores, block.chosen))
            self.choosing.setdefault(name, set()).add(step)
        truth = self.truths.get(step, {}).get(name)
        if truth is not None:
            rows = columns(value)[:, :tokens].T.astype(np.float32)
            self.seen.setdefault(truth, []).append(rows)

    def forget(self) -> None:
        """Forget what was seen so far."""
        for seen in (self.seen, self.experts, self.choosing):
            seen.clear()

    def result(self) -> Seen:
        judged = [running for running in self.calls if running.logits is not None]
        logits = gather(judged, "all")
        assert logits is not None
        return Seen(logits, self.numbers(judged), self.tensors(), self.choices())

    def tensors(self) -> dict[Truth, tuple[Array, Array]]:
        """The shards' outputs: by truth, the numbers of tokens, and their rows `(n, C)`."""
        return {
            truth: (self.numbers(self.makers(truth)), np.concatenate(rows))
            for truth, rows in self.seen.items()
        }

    def makers(self, truth: Truth) -> list[Running]:
        """The calls that output a tensor: in some modes, no step does."""
        steps = {step for step, truths in self.truths.items() if truth in truths.values()}
        return self.calls_of(steps)

    def choices(self) -> Choices:
        """The experts that the port shows, by layer, if it shows those of all tokens of a call."""
        chosen = {
            self.routed[name].layer: (
                self.numbers(self.calls_of(self.choosing[name])),
                np.concatenate(rows),
            )
            for name, rows in self.experts.items()
        }
        return {layer: own for layer, own in chosen.items() if len(own[0]) == len(own[1])}

    def calls_of(self, steps: Collection[Step | Route]) -> list[Running]:
        """The calls that have one of some steps."""
        return [
            running
            for running in self.calls
            if any(step in steps for own in running.steps.values() for step in own)
        ]

    def numbers(self, calls: Sequence[Running]) -> Array:
        """The numbers of the probe's tokens in these calls."""
        positions = [running.call.positions for running in calls]
        return np.concatenate(positions) - self.start if positions else np.empty(0, int)
