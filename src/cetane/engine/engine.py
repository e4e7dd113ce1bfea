"""Runs a plan: caches, calls in order, logits. It knows names and contracts, never a family."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from cetane.bundle import Tables
from cetane.engine.backend import Array, Arrays, Backend, Program
from cetane.engine.host import EMPTY, Call, host_input
from cetane.errors import CetaneError
from cetane.families.caches import CONTRACTS
from cetane.families.flow import FromCache, FromTensor, ToCache, ToTensor
from cetane.plan import Function, Plan
from cetane.recipe import Mode

Wanted = Literal["none", "last", "all"]
Watch = Callable[[str, str, Array, int], None]


class Engine:
    """A plan, a backend that runs its shards, and the host's tables. Shards open on first use."""

    def __init__(
        self, plan: Plan, backend: Backend, tables: Tables, modes: Sequence[Mode] | None = None
    ) -> None:
        self.plan, self.backend, self.tables = plan, backend, tables
        self.modes = {mode: step for mode, step in plan.modes.items() if not modes or mode in modes}
        self.seconds: dict[str, float] = defaultdict(float)
        """Time spent by shard, in opening shards (`load`), and by the host (`host`)."""
        self._programs: dict[str, Program] = {}
        self._functions = {
            (shard.name, function.name): function
            for shard in plan.shards
            for function in shard.functions
        }

    def program(self, shard: str) -> Program:
        """The opened shard."""
        if shard not in self._programs:
            started = time.perf_counter()
            self._programs[shard] = self.backend.open(shard)
            self.seconds["load"] += time.perf_counter() - started
        return self._programs[shard]

    def function(self, shard: str, name: str) -> Function:
        """The plan of a function."""
        return self._functions[shard, name]

    def session(self) -> "Session":
        """A new sequence: empty caches, position 0."""
        return Session(self)


class Session:
    """One sequence: its position, its caches, and which position every slot holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.context = self.plan.recipe.cache.context
        self.contract = CONTRACTS[self.plan.recipe.cache.contract]
        self.position = 0
        self.slots = np.full(self.context, EMPTY)
        self.tensors: Arrays = {}
        shapes = {
            item.source.name: item.shape
            for shard in self.plan.shards
            for function in shard.functions
            for item in function.inputs
            if isinstance(item.source, FromCache)
        }
        self.caches: Arrays = {n: np.zeros(s, engine.backend.dtype) for n, s in shapes.items()}
        self.states: dict[str, Any] = {}
        self.watch: Watch | None = None
        """Called with shard, output name, value and valid tokens of every output: for gates."""

    def feed(self, tokens: Sequence[int], wanted: Wanted = "last") -> Array | None:
        """Run tokens through the model and remember them.

        Returns logits fp32: `(V,)` of the last token, `(len(tokens), V)` of all, or None.
        Raises CetaneError when the context is full or a token is not in the vocabulary.
        """
        if not len(tokens):
            raise CetaneError("no tokens to run")
        unknown = [token for token in tokens if not 0 <= token < self.plan.vocab]
        if unknown:
            raise CetaneError(f"token {unknown[0]} is not in the vocabulary of {self.plan.vocab}")
        ids = np.asarray(tokens, dtype=np.int64)
        if self.position + len(ids) > self.context:
            raise CetaneError(
                f"{len(ids)} tokens after {self.position} do not fit a context of {self.context}",
                "port with a larger cache.context",
            )
        rows: list[Array] = []
        while len(ids):
            mode = self.choose(len(ids))
            taken = ids[: self.engine.modes[mode].tokens]
            ids = ids[len(taken) :]
            last = wanted == "last" and not len(ids)
            logits = self.call(mode, taken, wanted == "all" or last)
            if logits is not None:
                rows.append(logits[-1:] if last else logits)
        if wanted == "none":
            return None
        return rows[-1][0] if wanted == "last" else np.concatenate(rows)

    def choose(self, tokens: int) -> Mode:
        """The narrowest function that takes all tokens, else the widest that is filled.

        Padding is possible where a contract can keep the padded columns out of the cache.
        """
        widths = sorted((step.tokens, mode) for mode, step in self.engine.modes.items())
        free = self.context - self.position
        for width, mode in widths:
            if width == tokens or (width > tokens and self.contract.pads and width <= free):
                return mode
        fitting = [mode for width, mode in widths if width <= tokens]
        if not fitting:
            raise CetaneError(
                f"no function takes {tokens} tokens; widths: {[w for w, _ in widths]}"
            )
        return fitting[-1]

    def call(self, mode: Mode, tokens: Array, logits: bool = True) -> Array | None:
        """One pass over all shards; logits `(len(tokens), V)` fp32, or None when not asked for."""
        started = time.perf_counter()
        seconds = self.engine.seconds
        shards_before = sum(seconds.values()) - seconds["host"]
        call = self.prepare(tokens, self.engine.modes[mode].tokens)
        result = np.empty((len(tokens), self.plan.vocab), np.float32) if logits else None
        hosted: dict[str, Array] = {}
        for step in self.engine.modes[mode].steps:
            function = self.engine.function(step.shard, step.function)
            sinks = {item.name: item.sink for item in function.outputs}
            if not logits and self.plan.by_name[step.shard].kind == "head":
                continue
            inputs: Arrays = {}
            for item in function.inputs:
                if isinstance(item.source, FromTensor):
                    inputs[item.name] = self.tensors[item.source.name]
                elif isinstance(item.source, FromCache):
                    inputs[item.name] = self.caches[item.source.name]
                else:
                    if item.name not in hosted:
                        hosted[item.name] = host_input(
                            item, call, self.engine.tables, self.engine.backend.dtype
                        )
                    inputs[item.name] = hosted[item.name]
            for name, value in self.run(step.shard, step.function, inputs).items():
                sink = sinks[name]
                if self.watch is not None:
                    self.watch(step.shard, name, value, len(tokens))
                if isinstance(sink, ToTensor):
                    self.tensors[sink.name] = value
                elif isinstance(sink, ToCache):
                    self.store(sink, value, call)
                elif result is not None:
                    columns = value.reshape(sink.stop - sink.start, -1)[:, : len(tokens)]
                    result[:, sink.start : sink.stop] = columns.T
        self.slots = call.slots
        self.position += len(tokens)
        shards = sum(seconds.values()) - seconds["host"] - shards_before
        seconds["host"] += time.perf_counter() - started - shards
        return result

    def prepare(self, tokens: Array, width: int) -> Call:
        """Where the tokens go, and which keys they see."""
        count = len(tokens)
        positions = self.position + np.arange(count)
        padded = np.concatenate([positions, np.full(width - count, EMPTY)])
        if self.contract.contract == "shift":
            after = np.concatenate([self.slots, padded])[width:]
        else:
            after = self.slots.copy()
            after[positions] = positions
        sees_past = self.contract.contract == "readonly"
        keys = np.concatenate([self.slots, padded]) if sees_past else after
        order = self.plan.recipe.tensor_layout
        return Call(tokens, positions, width, after, keys, self.position, order)

    def run(self, shard: str, function: str, inputs: Arrays) -> Arrays:
        """Call a function of a shard, on the clock."""
        program = self.engine.program(shard)
        started = time.perf_counter()
        if shard not in self.states:
            self.states[shard] = program.make_state(function)
            self.engine.seconds["load"] += time.perf_counter() - started
            started = time.perf_counter()
        outputs = program.call(function, inputs, self.states[shard])
        self.engine.seconds[shard] += time.perf_counter() - started
        return outputs

    def store(self, sink: ToCache, value: Array, call: Call) -> None:
        """Write a cache as its contract says."""
        if sink.write == "replace":
            self.caches[sink.name] = value
        else:
            columns = len(call.tokens)
            target = self.caches[sink.name]
            target[..., call.start : call.start + columns] = value[..., :columns]
