"""The session: one sequence of tokens, with its schedule, its memory and their execution."""

from collections.abc import Collection, Sequence
from operator import index

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.call import Call, Running, line
from cetane.engine.execution import Execution, run
from cetane.engine.logits import HeadRows, Logits
from cetane.engine.memory import Mark, Memory
from cetane.engine.schedule import Schedule, Wanted
from cetane.errors import CetaneError
from cetane.schema.recipe import Mode

MOST_COUNTS = 16
"""The widest call for which `counts` lists every number of tokens: each needs measurements."""


class Session:
    """One sequence on an engine. `Engine.session` makes it.

    `feed` runs tokens and remembers them. `evaluate` runs tokens in one call, and `accept`
    remembers the first of them. `mark` and `rewind` return to an earlier position.
    """

    def __init__(
        self, schedule: Schedule, memory: Memory, execution: Execution, head: HeadRows
    ) -> None:
        self.schedule, self.memory, self.execution, self.head = schedule, memory, execution, head
        self.plan = head.plan
        self._failed = False
        self._adapter: str | None = None
        self._evaluated: Running | None = None
        """The last call of `evaluate`, until `accept` ends it."""
        self.path: tuple[int, ...] | None = None
        """The accepted columns of the last call; None after `feed`."""

    @property
    def position(self) -> int:
        """The position of the next token: the number of tokens so far, if the first was at 0."""
        return self.memory.position

    @property
    def adapter(self) -> str | None:
        """The adapter of the next calls; None for the base alone.

        It can change between any two calls. Caches and histories go on: earlier tokens keep what
        their own adapter computed. Raises CetaneError for an adapter that the plan lacks.
        """
        return self._adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        self.plan.on(name)
        self._adapter = name

    @property
    def context(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.schedule.context

    @property
    def no_trees(self) -> str | None:
        """The reason why `evaluate` takes no trees of tokens here; None where it does."""
        return self.schedule.no_trees

    @property
    def widths(self) -> list[int]:
        """The widths that a call can have now, in tokens, ascending."""
        return self.schedule.widths(self.position)

    def counts(self, most: int) -> list[int]:
        """The numbers of tokens at which the cost of a call changes, ascending.

        The last is the narrowest width that takes `most` tokens, or else the widest.
        """
        widths = self.widths
        widest = min((width for width in widths if width >= most), default=max(widths, default=0))
        if self.execution.shards.backend.by_rows and widest <= MOST_COUNTS:
            return list(range(1, widest + 1))
        return [width for width in widths if width <= widest]

    def feed(self, tokens: Sequence[int], wanted: Wanted = "last") -> Array | None:
        """Run tokens through the model and remember them.

        Returns logits fp32: `(V,)` of the last token, `(len(tokens), V)` of all, or None.
        Raises CetaneError if the context is full, and for tokens that are none of the vocabulary.
        """
        calls = self.prepare(tokens, wanted)
        self._failed = True  # until the end: a call that stops halfway leaves wrong caches
        run([(self.execution, calls)], self.execution.shards)
        self._failed = False
        return gather(calls, wanted)

    def prepare(
        self, tokens: Sequence[int], wanted: Wanted, modes: Collection[Mode] | None = None
    ) -> list[Running]:
        """The calls that `feed` would make, for `Engine.run`. The session counts their tokens as
        run.

        `modes` are the only modes to use, for gates.
        """
        ids = self._checked(tokens)
        schedule = (
            self.schedule if modes is None else Schedule(self.plan, modes, self.schedule.whole)
        )
        scheduled = schedule.cut(self.position, len(ids), wanted)
        self._evaluated = self.path = None
        calls = []
        for one in scheduled:
            taken, ids = ids[: one.count], ids[one.count :]
            calls.append(self._running(schedule, taken, one.mode, one.logits))
            self.memory.advance(calls[-1].call)
        return calls

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Array:
        """Run tokens in one call, and remember none before `accept`.

        `parents` make the tokens a tree: the column of the token that each one follows, an earlier
        column, or -1 for the last token of the sequence. Without them each follows the one before.
        Returns logits fp32 `(len(tokens), V)`. Unaccepted tokens of an earlier call are dropped.
        Raises CetaneError as `feed`, if no function is wide enough, and for a tree where the plan
        takes none (`no_trees`).
        """
        running = self._draft(tokens, parents)
        self._evaluated = None
        run([(self.execution, [running])], self.execution.shards)
        self._evaluated = running
        assert running.logits is not None and running.logits.rows is not None
        return running.logits.rows

    def prepare_draft(
        self, tokens: Sequence[int], path: Sequence[int], parents: Sequence[int] | None = None
    ) -> Running:
        """The call that `evaluate` would make, for `Engine.run`, of which `path` is accepted.

        The session counts the tokens of `path` as run. For gates, which know it before.
        """
        running = self._draft(tokens, parents)
        check_path(running.call, path)
        self._evaluated, self.path = None, tuple(path)
        self.memory.count_accepted(running.call, path)

        def keep() -> None:
            self.memory.write_accepted(running.call, running.writes, path)
            running.writes.clear()

        running.then.append(keep)
        return running

    def _draft(self, tokens: Sequence[int], parents: Sequence[int] | None) -> Running:
        """The call of `evaluate`."""
        ids = self._checked(tokens)
        tree = self._tree(len(ids), parents)
        self.schedule.check_room(self.position, len(ids))
        mode = self.schedule.choose(self.position, len(ids), held=True)
        width = self.schedule.modes[mode].tokens
        if width < len(ids):
            raise CetaneError(f"one call takes {width} tokens here, not {len(ids)}")
        running = self._running(self.schedule, ids, mode, logits=True, parents=tree)
        running.held = True
        return running

    def accept(self, count: int) -> None:
        """Remember only the first `count` tokens of the last evaluated call."""
        self._acceptable(count)
        self.accept_path(range(count))

    def accept_path(self, path: Sequence[int]) -> None:
        """Remember only the tokens in these columns of the last evaluated call, each of which
        follows the one before."""
        evaluated = self._acceptable(len(path))
        check_path(evaluated.call, path)
        self._evaluated, self.path = None, tuple(path)
        self.memory.accept(evaluated.call, evaluated.writes, path)

    def _acceptable(self, count: int) -> Running:
        """The last evaluated call. Raises CetaneError if it has fewer than `count` tokens."""
        evaluated = self._evaluated
        most = 0 if evaluated is None else len(evaluated.call.tokens)
        if evaluated is None or not 0 <= count <= most:
            raise CetaneError(f"cannot accept {count} tokens: {most} have been evaluated")
        return evaluated

    def take(self, other: "Session") -> None:
        """Continue from the tokens of another session, which stays unchanged. Its engine may have
        another backend, but must have the same plan.

        Raises CetaneError if a call of the other session failed."""
        other._check_whole()
        self._evaluated = self.path = None
        self.execution.take(other.execution)

    def mark(self) -> Mark:
        """A mark of the session's memory, to which `rewind` returns."""
        return self.memory.mark()

    def rewind(self, mark: Mark) -> None:
        """Return to a mark. Later marks become void."""
        self._evaluated = None
        self.memory.rewind(mark)

    def _tree(self, count: int, parents: Sequence[int] | None) -> tuple[int, ...] | None:
        """The parents of a tree's tokens; None for a line. Raises CetaneError for a wrong tree."""
        if parents is None or list(parents) == list(line(count)):
            return None
        earlier = all(-1 <= parent < column for column, parent in enumerate(parents))
        if len(parents) != count or not earlier:
            raise CetaneError(f"parents {list(parents)} make no tree of {count} tokens")
        if self.no_trees is not None:
            raise CetaneError(f"a call cannot hold a tree: {self.no_trees}", "draft a line")
        return tuple(parents)

    def _running(
        self,
        schedule: Schedule,
        ids: Array,
        mode: Mode,
        logits: bool,
        parents: tuple[int, ...] | None = None,
    ) -> Running:
        """A call, with room for it: the memory grows, and only `rewind` shrinks it."""
        fitting = schedule.capacity(self.position, len(ids), mode)
        if fitting.tokens > self.memory.capacity:
            self.memory.grow(fitting.tokens, fitting.caches)
        steps = schedule.steps(self.memory.capacity, mode, logits, self.adapter)
        width = self.execution.width(steps, schedule.modes[mode].tokens, len(ids))
        return Running(
            self.memory.place(ids, width, parents),
            steps,
            Logits(self.head, len(ids)) if logits else None,
            mode,
        )

    def _check_whole(self) -> None:
        """Raise CetaneError if a call of this session failed: it left wrong caches."""
        if self._failed:
            raise CetaneError("a call of this session failed", "start a new session")

    def _checked(self, tokens: Sequence[int]) -> Array:
        """The tokens as an array. Raises CetaneError for tokens that no call can take."""
        self._check_whole()
        return np.asarray(token_ids(tokens, self.plan.vocab), dtype=np.int64)


def token_ids(tokens: Sequence[int], vocab: int) -> list[int]:
    """Tokens as plain integers. Raises CetaneError if there are none, for one that is no integer,
    and for one that a vocabulary of this size lacks."""
    if not len(tokens):
        raise CetaneError("no tokens to run", "give at least one")
    try:
        ids = [index(token) for token in tokens]  # a cast would cut off what follows a point
    except TypeError as error:
        raise CetaneError("a token is not a whole number", "give a list of token ids") from error
    unknown = [token for token in ids if not 0 <= token < vocab]
    if unknown:
        raise CetaneError(
            f"token {unknown[0]} is not in the vocabulary of {vocab}",
            "give tokens of the model's own tokenizer",
        )
    return ids


def check_path(call: Call, path: Sequence[int]) -> None:
    """Raise CetaneError unless each token in these columns follows the one before."""
    count = len(call.tokens)
    parents = call.parents or line(count)
    inside = all(0 <= column < count for column in path)
    if not inside or [parents[column] for column in path] != [-1, *path][: len(path)]:
        raise CetaneError(f"cannot accept columns {list(path)}: they are no path of the call")


def gather(calls: Sequence[Running], wanted: Wanted) -> Array | None:
    """The logits of these calls: `(V,)` of the last token, `(n, V)` of all, or None."""
    if wanted == "none":
        return None
    rows = [c.logits.rows for c in calls if c.logits is not None and c.logits.rows is not None]
    if wanted == "last":
        return rows[-1][-1].copy()  # a view would keep the rows of the whole call in memory
    return np.concatenate(rows)
