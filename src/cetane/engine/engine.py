"""Runs a plan: caches, calls in order, logits. It knows names and contracts, never a family."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from cetane.bundle.tables import Tables
from cetane.engine.backend import Array, Arrays, Backend, Program
from cetane.engine.host import EMPTY, Call, accepted, host_input, place, room
from cetane.errors import CetaneError
from cetane.schema.function import Function, Route, Step
from cetane.schema.interface import (
    MASKED,
    FromCache,
    FromHistory,
    FromTensor,
    Input,
    Sink,
    ToCache,
    ToChoice,
    ToHistory,
    ToLogits,
    ToTensor,
    hidden_shape,
    time_axis,
)
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

Wanted = Literal["none", "last", "all"]
PORT_AGAIN = "port the model again"
Watch = Callable[[Step | Route, str, Array, int], None]


@dataclass
class Running:
    """A call on its way through the shards."""

    mode: Mode
    call: Call
    wanted: bool
    """Whether its logits are."""
    held: bool = False
    """Whether what it writes waits to be accepted."""
    tensors: Arrays = field(default_factory=dict)
    hosted: Arrays = field(default_factory=dict)
    writes: list[tuple[ToCache | ToHistory, Array]] = field(default_factory=list)
    logits: Array | None = None
    chosen: Array | None = None
    """Tokens: what a head has just chosen."""


@dataclass(frozen=True)
class Mark:
    """What a session remembered at some position."""

    position: int
    slots: dict[str, Array]
    caches: Arrays
    histories: Arrays


class Engine:
    """A plan, a backend that runs its shards, and the host's tables.

    Shards open on first use; where they are not `resident`, one at a time is in memory.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        tables: Tables,
        resident: bool = True,
    ) -> None:
        self.plan, self.backend, self.tables = plan, backend, tables
        self.resident = resident
        self.seconds: dict[str, float] = defaultdict(float)
        """Time spent by shard, in opening shards (`load`), and by the host (`host`)."""
        self._programs: dict[str, Program] = {}
        self.steps = {
            (mode, wanted): {
                shard.name: [step for step in steps if step.shard == shard.name]
                for shard in plan.shards
            }
            for mode, chosen in plan.modes.items()
            for wanted, steps in ((True, chosen.steps), (False, chosen.silent))
        }
        """The calls of a mode, where its logits are wanted and where not, by shard."""

        self.cheaper = {
            mode
            for mode, chosen in plan.modes.items()
            if not {s for s in chosen.steps if not self.is_head(s)} <= set(chosen.silent)
        }
        """Modes in which logits that nobody reads save more than the head."""

        self.tokens = plan.choosable
        """By row of the head."""
        self.unseen = np.full(plan.vocab, -np.inf, np.float32)
        """Logits before a head gives any: a token that it lacks can never be chosen, one that a
        slice does not choose has no chance."""
        self.unseen[self.tokens] = MASKED

    def is_head(self, step: Step | Route) -> bool:
        """Whether a step gives logits and no more."""
        if isinstance(step, Route):
            return False
        function = self.plan.functions[step.shard, step.function]
        only = all(isinstance(output.sink, ToLogits | ToChoice) for output in function.outputs)
        return only and not function.states

    def program(self, shard: str) -> Program:
        """The opened shard."""
        if shard not in self._programs:
            started = time.perf_counter()
            self._programs[shard] = self.backend.open(shard)
            self.seconds["load"] += time.perf_counter() - started
        return self._programs[shard]

    def session(self, modes: Sequence[Mode] | None = None) -> "Session":
        """A new sequence: empty caches, position 0. It uses only `modes`, if they are given."""
        return Session(self, modes)

    def run(
        self,
        work: "Sequence[tuple[Session, Sequence[Running]]]",
        shards: Sequence[str] | None = None,
    ) -> None:
        """Take all calls of some sessions through the shards, or some of them, each opened once.

        The calls of a session are of known tokens, so a call need not wait for the last shard of
        the one before: only for its own shard's caches.
        """
        started, before = time.perf_counter(), self._in_shards()
        for shard in self.plan.shards:
            if shards is not None and shard.name not in shards:
                continue
            for session, calls in work:
                for running in calls:
                    for step in self.steps[running.mode, running.wanted][shard.name]:
                        session.step(step, running)
            if not self.resident:
                self._programs.pop(shard.name, None)
        spent = time.perf_counter() - started
        self.seconds["host"] += spent - (self._in_shards() - before)

    def _in_shards(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != "host")


class Session:
    """One sequence: its position, what it remembers, and which position every slot holds."""

    def __init__(self, engine: Engine, modes: Sequence[Mode] | None) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.modes = {m: plan for m, plan in self.plan.modes.items() if not modes or m in modes}
        self.context = self.plan.recipe.cache.context
        self.order = self.plan.recipe.tensor_layout
        self.position = 0
        self.slots = {name: np.full(g.count, EMPTY) for name, g in self.plan.caches.items()}
        """By cache group: the position that every slot holds."""
        self.caches, self.histories = self._zeros(FromCache), self._zeros(FromHistory)
        self.states: dict[str, Any] = {}
        self.failed = False
        self.pending: Running | None = None
        """The call that was evaluated last, until some of its tokens are accepted."""
        self.watch: Watch | None = None
        """Called with step, output name, value and valid tokens of every output: for gates."""
        self.whole = False
        """Whether calls run all layers, even those whose logits nobody reads: for draft heads."""

    def _zeros(self, kind: type[FromCache | FromHistory]) -> Arrays:
        """What the host keeps of a kind, by name."""
        return {
            item.source.name: np.zeros(item.shape, self.engine.backend.dtype)
            for function in self.plan.functions.values()
            for item in function.inputs
            if isinstance(item.source, kind)
        }

    def feed(self, tokens: Sequence[int], wanted: Wanted = "last") -> Array | None:
        """Run tokens through the model and remember them.

        Returns logits fp32: `(V,)` of the last token, `(len(tokens), V)` of all, or None.
        Raises CetaneError when the context is full or a token is not in the vocabulary.
        """
        calls = self.schedule(self.check(tokens), wanted)
        self.failed = True  # until all went well: a call that stops halfway leaves caches behind
        self.engine.run([(self, calls)])
        self.failed = False
        return gather(calls, wanted)

    def evaluate(self, tokens: Sequence[int]) -> Array:
        """Run tokens in one call, and remember nothing until `accept` says how many of them count.

        Returns logits fp32 `(len(tokens), V)`. What an earlier call left unaccepted is forgotten.
        Raises CetaneError where `feed` does, and when no function is as wide as the tokens.
        """
        ids = self.check(tokens)
        self.check_room(len(ids))
        mode = self.choose(len(ids), held=True)
        width = self.modes[mode].tokens
        if width < len(ids):
            raise CetaneError(f"one call takes {width} tokens here, not {len(ids)}")
        running = Running(mode, self.prepare(ids, width), wanted=True, held=True)
        self.pending = None
        self.engine.run([(self, [running])])
        self.pending = running
        assert running.logits is not None
        return running.logits

    def accept(self, count: int) -> None:
        """Remember the first `count` tokens of the call that was evaluated last, and no others."""
        pending = self.pending
        if pending is None or not 0 <= count <= len(pending.call.tokens):
            most = 0 if pending is None else len(pending.call.tokens)
            raise CetaneError(f"cannot accept {count} tokens: {most} have been evaluated")
        self.pending = None
        if count:
            for sink, value in pending.writes:
                self.write(sink, value, pending.call, count)
        call = pending.call
        self.slots = {
            name: accepted(group, self.slots[name], call.positions, call.width, count)
            for name, group in self.plan.caches.items()
        }
        self.position += count

    def mark(self) -> Mark:
        """What the session remembers now, to come back to."""
        limited = [group.contract for group in self.plan.caches.values() if group.limited]
        if "stateful" in limited:
            raise CetaneError("a state of a window forgets what a mark would come back to")
        caches = {n: a.copy() if limited else a for n, a in self.caches.items()}
        return Mark(self.position, self.slots, caches, dict(self.histories))

    def rewind(self, mark: Mark) -> None:
        """Forget what came after a mark; later marks are void.

        A cache of the whole context is either replaced, so the mark has it as it was, or written at
        the positions of its columns, so those after the mark are hidden and will be written again.
        Of a window, whose slots are used again, the mark has a copy.
        """
        self.pending = None
        self.position, self.slots = mark.position, mark.slots
        self.caches, self.histories = dict(mark.caches), dict(mark.histories)

    def check(self, tokens: Sequence[int]) -> Array:
        """The tokens as an array; CetaneError for what no call can take."""
        if self.failed:
            raise CetaneError("a call of this session failed", "start a new session")
        if not len(tokens):
            raise CetaneError("no tokens to run")
        unknown = [token for token in tokens if not 0 <= token < self.plan.vocab]
        if unknown:
            raise CetaneError(f"token {unknown[0]} is not in the vocabulary of {self.plan.vocab}")
        return np.asarray(tokens, dtype=np.int64)

    def check_room(self, tokens: int) -> None:
        """CetaneError if so many more tokens do not fit the context."""
        if self.position + tokens > self.context:
            raise CetaneError(
                f"{tokens} tokens after {self.position} do not fit a context of {self.context}",
                "port with a larger cache.context",
            )

    def schedule(self, ids: Array, wanted: Wanted) -> list[Running]:
        """The calls for some tokens, which the session counts as run from here on."""
        before = self.slots, self.position
        try:
            return self._schedule(ids, wanted)
        except CetaneError:
            self.slots, self.position = before
            raise

    def _schedule(self, ids: Array, wanted: Wanted) -> list[Running]:
        self.check_room(len(ids))
        self.pending = None
        calls = []
        while len(ids):
            mode, count = self.next_call(len(ids), wanted)
            taken, ids = ids[:count], ids[count:]
            last = wanted == "last" and not len(ids)
            call = self.prepare(taken, self.modes[mode].tokens)
            whole = self.whole and mode in self.engine.cheaper
            calls.append(Running(mode, call, wanted == "all" or last or whole))
            self.slots = {name: placed.slots for name, placed in call.groups.items()}
            self.position += len(taken)
        return calls

    def next_call(self, tokens: int, wanted: Wanted) -> tuple[Mode, int]:
        """The mode of the next call of some tokens, and how many it takes.

        Where prefill is cheaper without logits, the one token whose logits are wanted is left for a
        call of its own.
        """
        mode = self.choose(tokens)
        cheaper = mode in self.engine.cheaper and not self.whole
        cheaper = cheaper and wanted == "last" and "decode" in self.modes
        if cheaper and tokens > 1 and self.choose(tokens - 1) == mode:
            tokens -= 1
        return mode, min(tokens, self.modes[mode].tokens)

    @property
    def room(self) -> int:
        """The most columns that one call can write now."""
        rooms = [room(group, self.position) for group in self.plan.caches.values()]
        return min((r for r in rooms if r is not None), default=self.context)

    @property
    def widths(self) -> list[int]:
        """Tokens per call of the functions that fit what is left of the context, ascending."""
        free = min(self.room, self.context - self.position)
        return sorted({step.tokens for step in self.modes.values() if step.tokens <= free})

    def choose(self, tokens: int, held: bool = False) -> Mode:
        """The narrowest function that takes all tokens, else the widest that is filled.

        Padding is possible where a contract can keep the padded columns out of the cache, and
        where the host does, in a call that is `held`.
        """
        room, free = self.room, self.context - self.position
        widths = sorted(
            (step.tokens, mode) for mode, step in self.modes.items() if step.tokens <= room
        )
        for width, mode in widths:
            padded = (held or self.pads(width)) and width <= free
            if width == tokens or (width > tokens and padded):
                return mode
        fitting = [mode for width, mode in widths if width <= tokens]
        if not fitting:
            raise CetaneError(
                f"no function takes {tokens} tokens; widths: {[w for w, _ in widths]}"
            )
        return fitting[-1]

    def pads(self, width: int) -> bool:
        """Whether a call of a width may hold fewer tokens."""
        return all(group.pads(width) for group in self.plan.caches.values())

    def prepare(self, tokens: Array, width: int) -> Call:
        """Where the tokens go, and which keys they see."""
        positions = self.position + np.arange(len(tokens))
        groups = {
            name: place(group, self.slots[name], positions, width)
            for name, group in self.plan.caches.items()
        }
        return Call(tokens, positions, width, self.order, groups)

    def step(self, step: Step | Route, running: Running) -> None:
        """One step of a call."""
        if isinstance(step, Route):
            outputs = self.route(step, running)
        else:
            function = self.plan.functions[step.shard, step.function]
            inputs = {item.name: self.input(item, running) for item in function.inputs}
            outputs = self.call(step.shard, function, inputs)
            for item in function.outputs:
                self.keep(item.sink, outputs[item.name], running)
        if self.watch is not None:
            for name, value in outputs.items():
                self.watch(step, name, value, len(running.call.tokens))

    def route(self, route: Route, running: Running) -> Arrays:
        """Run the chosen experts, each on the columns of its tokens."""
        scores = columns(running.tensors[route.scores])[:, : len(running.call.tokens)]
        choices = scores.argmax(axis=0)  # the first, of equals
        results: Arrays = {}
        for expert in np.unique(choices):
            functions = [self.plan.functions[route.shard, n] for n in route.experts[expert]]
            mine = np.flatnonzero(choices == expert)
            while len(mine):
                fitting = [f for f in functions if f.tokens >= len(mine)]
                function = fitting[0] if fitting else functions[-1]
                taken, mine = mine[: function.tokens], mine[function.tokens :]
                inputs = {
                    item.name: self.spread(self.input(item, running), taken, function.tokens)
                    for item in function.inputs
                }
                for name, value in self.call(route.shard, function, inputs).items():
                    found = columns(value)
                    whole = results.setdefault(
                        name, np.zeros((len(found), running.call.width), value.dtype)
                    )
                    whole[:, taken] = found[:, : len(taken)]
        outputs = {
            name: value.reshape(hidden_shape(self.order, *value.shape))
            for name, value in results.items()
        }
        sinks = {
            item.name: item.sink
            for item in self.plan.functions[route.shard, route.experts[0][0]].outputs
        }
        for name, value in outputs.items():
            self.keep(sinks[name], value, running)
        return outputs

    def spread(self, value: Array, taken: Array, width: int) -> Array:
        """Some columns of a hidden tensor as one of their own, padded with zeros to `width`."""
        picked = columns(value)[:, taken]
        picked = np.pad(picked, ((0, 0), (0, width - len(taken))))
        return picked.reshape(hidden_shape(self.order, len(picked), width))

    def input(self, item: Input, running: Running) -> Array:
        """The array for an input, wherever it comes from."""
        if isinstance(item.source, FromTensor):
            return running.tensors[item.source.name]
        if isinstance(item.source, FromCache):
            return self.caches[item.source.name]
        if isinstance(item.source, FromHistory):
            return self.histories[item.source.name]
        if item.name not in running.hosted:
            running.hosted[item.name] = host_input(
                item, running.call, self.engine.tables, self.engine.backend.dtype
            )
        return running.hosted[item.name]

    def call(self, shard: str, function: Function, inputs: Arrays) -> Arrays:
        """Call a function of a shard, on the clock."""
        program = self.engine.program(shard)
        started = time.perf_counter()
        if function.owner not in self.states:
            self.states[function.owner] = program.make_state(function.name)
            self.engine.seconds["load"] += time.perf_counter() - started
            started = time.perf_counter()
        outputs = program.call(function.name, inputs, self.states[function.owner])
        self.engine.seconds[shard] += time.perf_counter() - started
        flexible = self.plan.recipe.tokens.shapes == "range"
        for item in function.outputs:  # neither a plan nor a package is to be trusted
            value = outputs.get(item.name)
            if value is None or not (flexible or value.size == prod(item.shape)):
                raise CetaneError(
                    f"{shard}/{function.name} does not give the {item.name} of its plan",
                    PORT_AGAIN,
                )
        return outputs

    def keep(self, sink: Sink, value: Array, running: Running) -> None:
        """Put an output where it belongs; of padded tokens nothing is remembered."""
        count = len(running.call.tokens)
        if isinstance(sink, ToTensor):
            running.tensors[sink.name] = value
        elif isinstance(sink, ToCache | ToHistory):
            if running.held:
                running.writes.append((sink, value))
            else:
                self.write(sink, value, running.call, count)
        elif running.wanted:
            if running.logits is None:
                running.logits = np.tile(self.engine.unseen, (count, 1))
            if isinstance(sink, ToChoice) and sink.part == "row":
                rows = value.reshape(-1)[:count]
                if not ((rows >= 0) & (rows < sink.stop - sink.start)).all():
                    raise CetaneError("a head chose a token that there is not", PORT_AGAIN)
                running.chosen = self.engine.tokens[sink.start + rows]
            elif isinstance(sink, ToChoice):
                chosen = self.capped(value.reshape(-1)[:count])
                running.logits[np.arange(count), running.chosen] = chosen
            else:
                found = self.capped(columns(value)[:, :count].T)
                running.logits[:, self.plan.tokens(sink.start, sink.stop)] = found

    def capped(self, logits: Array) -> Array:
        """Logits in fp32, as the model's softcap leaves them."""
        found: Array = logits.astype(np.float32)
        cap = self.plan.softcap
        return found if cap is None else cap * np.tanh(found / cap)

    def write(self, sink: ToCache | ToHistory, value: Array, call: Call, count: int) -> None:
        """Remember what a call wrote for its first `count` tokens."""
        if isinstance(sink, ToHistory):
            axis, past = time_axis(self.order), self.histories[sink.name]
            joined = np.concatenate([past, np.take(value, range(count), axis)], axis)
            length = past.shape[axis]
            self.histories[sink.name] = np.take(joined, range(-length, 0), axis)
            return
        before, targets = self.caches[sink.name], call.groups[sink.group].targets[:count]
        shifts = self.plan.caches[sink.group].contract == "shift"
        if shifts and (sink.write == "append" or count < call.width):
            new = value if sink.write == "append" else value[..., -call.width :]
            joined = np.concatenate([before, new[..., :count]], -1)
            self.caches[sink.name] = joined[..., count:]
        elif sink.write == "append":
            before[..., targets] = value[..., :count]
        elif count < len(call.tokens):
            kept = before.copy()
            kept[..., targets] = value[..., targets]
            self.caches[sink.name] = kept
        else:
            self.caches[sink.name] = value


def columns(value: Array) -> Array:
    """A hidden tensor of either order as `(C, T)`."""
    return value.reshape(value.shape[1], -1)


def gather(calls: Sequence[Running], wanted: Wanted) -> Array | None:
    """The logits of some calls: `(V,)` of the last token, `(n, V)` of all, or None."""
    rows = [running.logits for running in calls if running.logits is not None]
    if wanted == "none":
        return None
    return rows[-1][-1] if wanted == "last" else np.concatenate(rows)
