"""The runner of a draft head's shard. It uses the memory and the execution of a session.

It needs a schedule of its own: the next function depends on the tokens that the target accepts.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import MAKE_AGAIN, DraftHead
from cetane.bundle.tables import Tables
from cetane.engine.backend import Array, Arrays, Backend
from cetane.engine.call import Running, columns, hidden
from cetane.engine.execution import Execution, run
from cetane.engine.memory import Memory
from cetane.engine.shards import OpenShards
from cetane.schema.function import Function, Step
from cetane.schema.interface import FromTensor
from cetane.speculate.drafter import DraftTimes
from cetane.speculate.timing import RecentMedian

TRIALS = 5
"""Calls of each function before the first draft."""
SWEPT = 1 << 26
"""Bytes that are read before a trial, so that no cache of the processor holds the draft head's
weights. A call of the target leaves none there either. Without this, a first token seemed to take
half of its time."""


class DraftHeadRunner:
    """An opened draft head. Its logits are fp32, over the tokens of `vocabulary (R,)`."""

    warm: ClassVar[frozenset[str]] = frozenset()
    """The functions that always follow another call of the draft head."""

    def __init__(
        self, draft_head: DraftHead, bundle: Bundle, backend: Backend, first: int = 0
    ) -> None:
        """`backend` opens the draft head's shard. Its first token is at position `first`."""
        self.draft_head, manifest = draft_head, draft_head.manifest
        self.steps = manifest.steps
        self.vocabulary = np.array(draft_head.vocabulary())
        self.functions = {function.name: function for function in manifest.functions}
        order = bundle.plan.recipe.tensor_layout
        self.memory = Memory(manifest.caches, manifest.functions, order, backend.dtype, first)
        self.start = self.memory.mark()
        self.execution = Execution(
            {(draft_head.name, f.name): f for f in manifest.functions},
            OpenShards(backend, [draft_head.name], MAKE_AGAIN),
            Tables(bundle.tables().embedding, draft_head.rotary()),
            self.memory,
        )
        self.seconds: defaultdict[str, RecentMedian] = defaultdict(RecentMedian)
        """Seconds of a call now, by function."""
        self.try_out()

    @property
    def times(self) -> DraftTimes:
        """The seconds of its drafts, by its last calls."""
        return DraftTimes(asking=self.seconds["draft"].usual, token=0.0)

    def try_out(self) -> None:
        """Run all functions on zeros, so that none compiles later, and all times are known."""
        for function in self.functions.values():
            self.trial(function)
        self.seconds.clear()
        swept = np.zeros(SWEPT, np.uint8)
        for function in self.functions.values():
            for _ in range(TRIALS):
                if function.name not in self.warm:
                    swept.max()
                self.trial(function)

    def trial(self, function: Function) -> None:
        """Run a function on zeros."""
        reads = {
            item.source.name: np.zeros((1, prod(item.shape) // function.tokens))
            for item in function.inputs
            if isinstance(item.source, FromTensor)
        }
        self.call(function, [0], **reads)
        self.forget()

    def forget(self) -> None:
        """Forget the sequence: a new one begins."""
        self.memory.rewind(self.start)

    def call(self, function: Function, tokens: Sequence[int], **rows: Array) -> Arrays:
        """Run a function for the next tokens.

        `rows (n, C)` are its input tensors, by name. Returns its output tensors as `(C, columns)`.
        If n is less than the width, the last columns are padding.
        """
        started = time.perf_counter()
        name, memory = str(self.draft_head.name), self.memory
        steps = {name: [Step(shard=name, function=function.name)]}
        width = self.execution.width(steps, function.tokens, len(tokens))
        call = memory.place(np.asarray(tokens), width)
        dtype = self.execution.shards.backend.dtype
        tensors = {
            key: hidden(value.T.astype(dtype), width, memory.order) for key, value in rows.items()
        }
        running = Running(call, steps, tensors=tensors)
        run([(self.execution, [running])], self.execution.shards)
        memory.advance(call)
        self.seconds[function.name].add(time.perf_counter() - started)
        return {key: columns(value) for key, value in running.tensors.items()}


class MedusaRunner(DraftHeadRunner):
    """Makes all tokens of a draft from one hidden state."""

    def draft(self, last: Array) -> Array:
        """Logits `(steps, R)` from the last hidden state `(C,)` of the newest token."""
        self.forget()
        made = self.call(self.functions["draft"], [0], hidden=last[None])
        return made["logits"].T.astype(np.float32)


class Eagle3Runner(DraftHeadRunner):
    """Follows the accepted tokens, then continues from its own output.

    When it follows again, it drops the columns of its own drafted tokens.
    """

    warm = frozenset({"draft"})
    wide: bool | None = None
    """Whether `read` makes wide calls. None for what takes less time, which is never certain, so
    gates say it."""

    def forget(self) -> None:
        super().forget()
        self.accepted = self.start
        """A mark after the last accepted token."""

    @property
    def times(self) -> DraftTimes:
        first, later = self.seconds["follow"].usual, self.seconds["draft"].usual
        reads = tuple(
            (self.functions[name].tokens, self.seconds[name].usual)
            for name in ("follow", "read")
            if name in self.functions
        )
        return DraftTimes(max(0.0, first - later), later, reads[0][0], reads)

    @property
    def done(self) -> int:
        """The number of accepted tokens that it has followed."""
        return self.accepted.position

    @property
    def room(self) -> int:
        """The number of tokens for which its cache still has room."""
        return min(slots.count for slots in self.memory.groups.values()) - self.memory.position

    def follow(self, features: Array, after: Sequence[int]) -> Array:
        """Run over n > 0 accepted tokens: hidden states `(n, 3, C)`, and the n tokens after them.

        Returns the logits `(R,)` of the token after the last.
        """
        follow = self.functions["follow"]
        before = max(0, len(after) - follow.tokens)
        self.read(features[:before], after[:before])
        rows, tokens = features[before:].reshape(len(features) - before, -1), after[before:]
        logits = self._keep(self.call(follow, tokens, features=rows), len(tokens) - 1)
        self.accepted = self.memory.mark()
        return logits

    def read(self, features: Array, after: Sequence[int]) -> None:
        """Run over accepted tokens as `follow` does, without logits: few of them by `follow`, where
        that takes less time than a wide call."""
        self.memory.rewind(self.accepted)
        done = 0
        while done < len(after):
            function = self._reading(len(after) - done)
            part = features[done : done + function.tokens]
            tokens = after[done : done + function.tokens]
            self.call(function, tokens, features=part.reshape(len(part), -1))
            done += len(tokens)
        self.accepted = self.memory.mark()

    def _reading(self, count: int) -> Function:
        """The function that reads so many tokens, or the first of them."""
        follow, read = self.functions["follow"], self.functions.get("read")
        if read is None:
            return follow
        wide, calls = self.wide, -(-count // follow.tokens)
        if wide is None:
            wide = calls * self.seconds["follow"].usual > self.seconds["read"].usual
        return read if wide else follow

    def step(self, token: int) -> Array:
        """Continue with a drafted token. Returns the logits `(R,)` of the token after it."""
        return self._keep(self.call(self.functions["draft"], [token], hidden=self.made), 0)

    def _keep(self, made: Arrays, column: int) -> Array:
        """The logits of a column. Keeps its hidden state for the next step."""
        self.made = made["hidden"][:, column][None]
        return made["logits"][:, column].astype(np.float32)


def open_runner(
    draft_head: DraftHead, bundle: Bundle, backend: Backend, first: int = 0
) -> MedusaRunner | Eagle3Runner:
    """Open a bundle's draft head; `backend` opens its shard. Sequences begin at `first`."""
    kind = MedusaRunner if draft_head.name == "medusa" else Eagle3Runner
    return kind(draft_head, bundle, backend, first)
