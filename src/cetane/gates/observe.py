"""Observations of a port: its logits and its shards' outputs, on probes."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import Running, columns
from cetane.engine.engine import Engine
from cetane.engine.execution import Watch
from cetane.engine.host import host_input
from cetane.engine.memory import Mark
from cetane.engine.schedule import Wanted
from cetane.engine.session import Session, gather
from cetane.families import Truth
from cetane.gates.experts import Choices, Chosen, best, far_blocks, ranked, routed_blocks
from cetane.gates.far_experts import far_names
from cetane.gates.heads import Rows, head_slices, shown_logits, shown_name
from cetane.gates.probes import (
    AFTER,
    LEAST_OWN,
    HostWay,
    Probe,
    ProbePart,
    probe_parts,
    tree_parents,
    tree_path,
    whole_parts,
)
from cetane.gates.reference import Observed
from cetane.planner import Planner
from cetane.schema.function import Route, Step
from cetane.schema.interface import Embedding
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class ProbeTask:
    """A probe, the mode that it judges, and the modes that take its tokens."""

    mode: Mode
    probe: Probe
    parts: tuple[ProbePart, ...]

    def ways(self, at: Array) -> Iterator[tuple[HostWay, Array]]:
        """Each way in which tokens `at (n,)` are taken, and whether each one is: bool `(n,)`."""
        stops = np.cumsum([part.tokens for part in self.parts])
        ways = np.array([part.way for part in self.parts])[np.searchsorted(stops, at, "right")]
        for way in dict.fromkeys(part.way for part in self.parts):
            if (some := ways == way).any():
                yield way, some


def structure_tasks(plan: Plan, probes: Sequence[Probe]) -> list[ProbeTask]:
    """Every probe in every mode, as the question about structure asks."""
    return [
        ProbeTask(mode, probe, probe_parts(plan, mode, probe))
        for mode in plan.modes
        for probe in probes
    ]


def whole_calls(plan: Plan, name: str, tokens: Callable[[int], tuple[int, ...]]) -> list[ProbeTask]:
    """A task for each mode: its `whole_parts`, each on as many `tokens`. With several capacities,
    each larger one gets them too, at the last positions that it holds.

    So all functions run, but for those of experts that no token takes."""
    tasks = []
    for capacity, mode in product(plan.capacities, plan.modes):
        made = whole_parts(plan, mode, capacity.tokens)
        read = [token for part in made for token in tokens(part.tokens)]
        start = 0 if capacity == plan.capacities[0] else capacity.tokens - len(read)
        called = f"{name}, {mode}" + (f", at {start}" if start else "")
        tasks.append(ProbeTask(mode, Probe(called, tuple(read), start), made))
    return tasks


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
    by_mode: dict[Mode, Array] = field(default_factory=dict)
    """The numbers of the tokens that each mode took."""
    slices: dict[Rows, tuple[Array, Array]] = field(default_factory=dict)
    """By slice of a head that chooses, the numbers of tokens, and their logits `(n, rows)`, as far
    as the port shows them."""
    by_capacity: dict[int, Array] = field(default_factory=dict)
    """The numbers of the tokens that the functions of each capacity took; empty for one capacity
    alone."""

    def taken(self, task: ProbeTask, at: Array) -> Iterator[tuple[HostWay, int | None, Array]]:
        """Each way and each capacity in which tokens `at (n,)` of a task were taken, and whether
        each one was: bool `(n,)`. The capacity is None if there is one alone."""
        for way, some in task.ways(at):
            if not self.by_capacity:
                yield way, None, some
            for capacity, numbers in self.by_capacity.items():
                if (own := some & np.isin(at, numbers)).any():
                    yield way, capacity, own

    def finite(self, tokens: "Array | slice") -> bool:
        """Whether no tensor has infinity or NaN, and no logit of the head's `tokens`."""
        every = [self.logits[:, tokens], *(rows for _, rows in self.tensors.values())]
        return all(bool(np.isfinite(rows).all()) for rows in every)

    def whole(self, count: int) -> Observed:
        """The logits, and the tensors that have all `count` tokens, in the form of the truth."""
        full = {truth: rows for truth, (at, rows) in self.tensors.items() if len(at) == count}
        return Observed(self.logits, full)


def observe(
    engine: Engine,
    planner: Planner,
    tasks: Sequence[ProbeTask],
    after: Session | None = None,
    watch: Sequence[Watch] = (),
) -> list[Seen]:
    """The port's results on every task. Every shard opens once.

    With `after`, every sequence goes on from that session's caches. `watch` sees every output too.
    """
    watched = [Watched(engine, planner, task, after, watch) for task in tasks]
    engine.run([(w.session, w.calls) for w in watched], last=True)
    return [w.result() for w in watched]


def unchosen(
    planner: Planner, plan: Plan, seen: Sequence[Seen]
) -> dict[Mode, list[tuple[int, int]]]:
    """By mode, the layers with experts that a graph computes and no token was seen to take, and
    their numbers.

    Experts with functions of their own are left out: `idle_functions` names those."""
    found: dict[Mode, list[tuple[int, int]]] = {}
    for mode, block in product(plan.modes, routed_blocks(planner.model.layers).values()):
        count = planner.model.channels[block.scores] - len(experts_taken(seen, mode, block.layer))
        if count and (block.together > 1 or mode not in plan.recipe.layout.routed):
            found.setdefault(mode, []).append((block.layer, count))
    return found


def experts_taken(seen: Sequence[Seen], mode: Mode, layer: int) -> set[int]:
    """The experts of a layer that the tokens of a mode were seen to take."""
    taken: set[int] = set()
    for one in seen:
        if layer in one.choices and mode in one.by_mode:
            numbers, experts, _ = one.choices[layer]
            taken.update(experts[np.isin(numbers, one.by_mode[mode])].ravel().tolist())
    return taken


class Watched:
    """A sequence that runs through the shards, and their outputs.

    Where a mode's calls cannot be padded, single-token calls take the tokens that fill no call.
    """

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        task: ProbeTask,
        after: Session | None = None,
        watch: Sequence[Watch] = (),
    ) -> None:
        """`after` is a session of the same plan, perhaps on another backend, from which the
        sequence goes on."""
        self.engine = engine
        self.session = engine.session(watch=[self.keep, *watch], start=task.probe.start)
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
        self.with_far = far_blocks(planner.model.layers)
        """The blocks with far experts, by the names of what the port shows of these."""
        self.far: dict[str, list[Array]] = {}
        """The far experts of each call, by these names: bool `(n, E)`."""
        self.choosing: dict[str, set[Step | Route]] = {}
        """The steps that show them: calls that only fill caches may leave a layer's experts out."""
        slices = head_slices(engine.plan.functions.values())
        self.slices = {shown_name(rows): rows for rows in slices}
        self.logits: dict[str, list[Array]] = {}
        """The logits of each call, by the names of the slices of a head that chooses."""
        self.probe_calls: list[ProbeCall] = []
        at = 0
        for part in task.parts:
            self._make(part, task.probe.tokens[at : at + part.tokens])
            at += part.tokens
        if task.probe.scale != 1:
            self._scale(task.probe.scale)

    @property
    def calls(self) -> list[Running]:
        return [one.running for one in self.probe_calls]

    def _make(self, part: ProbePart, tokens: Sequence[int]) -> None:
        """Make the calls that take a part of the probe."""
        if part.way == "rewind":
            self._rewind(part, tokens)
            if self.engine.plan.copies:
                tokens = self._go_on_from_a_copy(part, tokens)
        elif part.way in ("draft", "tree"):
            tokens = self._draft(part, tokens)
        wanted: Wanted = "last" if part.way == "last" else "all" if part.judged else "none"
        calls = self.session.prepare(tokens, wanted, dict.fromkeys((part.mode, "decode")))
        self._count(calls)
        if wanted == "last":
            self.probe_calls[-1] = replace(self.probe_calls[-1], last=True)

    def _count(self, calls: Sequence[Running]) -> None:
        """Note calls that hold only tokens of the probe."""
        self.probe_calls += [
            ProbeCall(running, range(len(running.call.tokens))) for running in calls
        ]

    def _rewind(self, part: ProbePart, tokens: Sequence[int]) -> None:
        """Mark the memory, take wrong tokens, and rewind; then do so in every shard."""
        session, marks = self.session, list[Mark]()
        count = max(self.engine.plan.modes[part.mode].tokens, LEAST_OWN // 2)
        mark = session.mark()
        wrong = session.prepare(self._wrong(tokens, count), "none", [part.mode, "decode"])
        session.rewind(mark)
        self.probe_calls[-1].running.then.append(lambda: marks.append(session.mark()))
        wrong[-1].then.append(lambda: session.rewind(marks.pop()))
        self.probe_calls += [ProbeCall(running, ()) for running in wrong]

    def _go_on_from_a_copy(self, part: ProbePart, tokens: Sequence[int]) -> Sequence[int]:
        """Have a copy of the memory take the first half of some tokens, as for a second
        conversation. Then the memory itself takes wrong ones, and the copy goes on.

        Returns the other half."""
        session, modes = self.session, dict.fromkeys((part.mode, "decode"))
        half, mark = len(tokens) // 2, session.mark()
        right = session.prepare(tokens[:half], "all", modes)
        reached = session.mark()
        session.rewind(mark)
        wrong = session.prepare(self._wrong(tokens, len(tokens)), "none", modes)
        session.rewind(reached)
        original, copy = list[Mark](), list[Mark]()

        def branch() -> None:
            original.append(session.mark())
            session.rewind(original[0].copied())

        def back() -> None:
            copy.append(session.mark())
            session.rewind(original.pop())

        self.probe_calls[-1].running.then.append(branch)
        right[-1].then.append(back)
        wrong[-1].then.append(lambda: session.rewind(copy.pop()))
        self._count(right)
        self.probe_calls += [ProbeCall(running, ()) for running in wrong]
        return tokens[half:]

    def _draft(self, part: ProbePart, tokens: Sequence[int]) -> Sequence[int]:
        """Have one call take some tokens of a part, and refuse wrong ones beside them.

        Returns those that follow. A line stands for a tree where calls hold none. A mode whose call
        has no room at this position makes none, and all tokens are returned.
        """
        session = self.session
        if self.engine.plan.modes[part.mode].tokens not in session.widths:
            return tokens
        right, after = tokens[:-AFTER], tokens[-AFTER:]
        tree = part.way == "tree" and session.no_trees is None
        path = tree_path(part.drafted) if tree else range(len(right))
        draft = self._wrong(tokens, part.drafted)
        for column, token in zip(path, right, strict=True):
            draft[column] = token
        parents = tree_parents(part.drafted) if tree else None
        self.probe_calls.append(ProbeCall(session.prepare_draft(draft, path, parents), path))
        return after

    def _wrong(self, tokens: Sequence[int], count: int) -> list[int]:
        """So many tokens that differ from those of the probe."""
        return [(tokens[i % len(tokens)] + 1) % self.engine.plan.vocab for i in range(count)]

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
            chosen = ranked if block.bounded else best
            self.experts.setdefault(name, []).append(chosen(scores, block.chosen))
            self.choosing.setdefault(name, set()).add(step)
        far = self.with_far.get(name)
        if far is not None and value.shape[1:2] == (self.channels[far.scores],):
            self.far.setdefault(name, []).append(columns(value)[:, :tokens].T > 0)
        if name in self.slices:
            self.logits.setdefault(name, []).append(shown_logits(value, self.slices[name], tokens))
        truth = self.truths.get(step, {}).get(name)
        if truth is not None:
            rows = columns(value)[:, :tokens].T.astype(np.float32)
            self.seen.setdefault(truth, []).append(rows)

    def forget(self) -> None:
        """Forget what was seen so far."""
        for seen in (self.seen, self.experts, self.far, self.choosing, self.logits):
            seen.clear()

    def result(self) -> Seen:
        judged = [one for one in self.probe_calls if one.running.logits is not None]
        logits = np.concatenate([one.logits() for one in judged])
        at = self.numbers(judged, logits=True)
        return Seen(
            logits, at, self.tensors(), self.choices(), self.by_mode(), self.shown(),
            self.by_capacity(),
        )  # fmt: skip

    def by(self, key: "Callable[[ProbeCall], Key | None]") -> dict[Key, Array]:
        """The numbers of the tokens of calls by their key; calls without one are left out."""
        calls: defaultdict[Key, list[ProbeCall]] = defaultdict(list)
        for one in self.probe_calls:
            if (own := key(one)) is not None:
                calls[own].append(one)
        return {own: self.numbers(some) for own, some in calls.items()}

    def by_mode(self) -> dict[Mode, Array]:
        """The numbers of the tokens that each mode took."""
        return self.by(lambda one: one.running.mode)

    def by_capacity(self) -> dict[int, Array]:
        """The numbers of the tokens that each capacity's functions took, if there are several."""
        if not self.engine.plan.smaller:
            return {}
        return dict(sorted(self.by(lambda one: self.capacity(one.running)).items()))

    def capacity(self, running: Running) -> int:
        """The capacity of a call's functions."""
        plan = self.engine.plan
        steps = [step for own in running.steps.values() for step in own if isinstance(step, Step)]
        made_for = [plan.functions[step.shard, step.function].capacity for step in steps]
        return next((tokens for tokens in made_for if tokens), plan.recipe.cache.context)

    def tensors(self) -> dict[Truth, tuple[Array, Array]]:
        """The shards' outputs: by truth, the numbers of tokens, and their rows `(n, C)`."""
        makers = {truth: self.makers(truth) for truth in self.seen}
        return {
            truth: (self.numbers(makers[truth]), rows_of(makers[truth], rows))
            for truth, rows in self.seen.items()
        }

    def makers(self, truth: Truth) -> list["ProbeCall"]:
        """The calls that output a tensor: in some modes, no step does."""
        steps = {step for step, truths in self.truths.items() if truth in truths.values()}
        return self.calls_of(steps)

    def choices(self) -> Choices:
        """The experts that the port shows, by layer, if it shows those of all tokens of a call."""
        chosen: dict[int, Chosen] = {}
        for name, rows in self.experts.items():
            calls, block = self.calls_of(self.choosing[name]), self.routed[name]
            counts = [len(one.running.call.tokens) for one in calls]
            far = [self.far.get(name, []) for name in far_names(block)]
            if all(counts == [len(own) for own in shown] for shown in (rows, *far)):
                sets = [rows_of(calls, shown) for shown in far]
                chosen[block.layer] = Chosen(
                    self.numbers(calls), rows_of(calls, rows), np.stack(sets, 1) if sets else None
                )
        return chosen

    def shown(self) -> dict[Rows, tuple[Array, Array]]:
        """The logits among which slices of the head chose, as in `Seen.slices`."""
        calls = [one for one in self.probe_calls if one.running.logits is not None]
        return {
            self.slices[name]: (self.numbers(calls), rows_of(calls, rows))
            for name, rows in self.logits.items()
        }

    def calls_of(self, steps: Collection[Step | Route]) -> list["ProbeCall"]:
        """The calls that have one of some steps."""
        return [
            one
            for one in self.probe_calls
            if any(step in steps for own in one.running.steps.values() for step in own)
        ]

    def numbers(self, calls: Sequence["ProbeCall"], logits: bool = False) -> Array:
        """The numbers of the probe's tokens in these calls, or of those with logits."""
        positions = [
            one.running.call.positions[list(one.judged if logits else one.columns)] for one in calls
        ]
        return np.concatenate(positions) - self.start if positions else np.empty(0, int)


@dataclass(frozen=True)
class ProbeCall:
    """A call of a probe."""

    running: Running
    columns: Sequence[int]
    """Those that hold the probe's tokens, and not wrong ones."""
    last: bool = False
    """Whether only the last token's logits are wanted."""

    @property
    def judged(self) -> Sequence[int]:
        """The columns whose logits are judged."""
        return self.columns[-1:] if self.last else self.columns

    def logits(self) -> Array:
        """Their logits `(n, V)`, as a session gives them."""
        logits = gather([self.running], "last" if self.last else "all")
        assert logits is not None
        rows: Array = logits[None] if self.last else logits[list(self.columns)]
        return rows


def rows_of(calls: Sequence[ProbeCall], rows: Sequence[Array]) -> Array:
    """The rows of a probe's tokens, of those of each call: all its columns."""
    return np.concatenate([own[list(one.columns)] for one, own in zip(calls, rows, strict=True)])
