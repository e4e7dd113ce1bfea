"""Drafters that run draft heads on the hidden states of the target's calls."""

from collections.abc import Iterator, Sequence

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.engine.backend import Array, Backend
from cetane.engine.execution import Watch
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.schema.plan import Plan
from cetane.speculate.draft_heads.features import Taps
from cetane.speculate.draft_heads.runner import (
    DraftHeadRunner,
    Eagle3Runner,
    MedusaRunner,
    open_runner,
)
from cetane.speculate.drafter import DraftTimes
from cetane.speculate.network import NetworkDrafter


class DraftHeadDrafter(NetworkDrafter):
    """Hands the hidden states of a sequence to a draft head."""

    def __init__(self, runner: DraftHeadRunner) -> None:
        super().__init__()
        self.runner = runner
        self.vocabulary = runner.vocabulary
        self.taps: Taps | None = None
        self.base = 0
        """The tokens before the first that it sees: a server's session may hold them already."""

    @property
    def times(self) -> DraftTimes:
        return self.runner.times

    def watch(self, plan: Plan) -> Watch:
        self.taps = Taps(plan, self.runner.draft_head.manifest.taps)
        return self.taps.see

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        if self.taps is None or self.taps.see not in session.execution.watch:
            raise CetaneError(
                f"the {self.name} draft head does not see the hidden states of this session",
                "open the session with Speculator.session",
            )
        if session is not self.session:
            self.base = self.taps.taken = session.position - self.taps.waiting
        super().begin(session, tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        assert self.taps is not None
        if self.taps.width != 1:  # a plain step refuses nothing, so its row may wait
            self.take()

    def take(self) -> None:
        """Take what the session has computed since the last time."""
        assert self.taps is not None and self.session is not None
        self.see(self.taps.take(self.session.position, self.session.path))

    def see(self, features: Array) -> None:
        """Take the hidden states `(n, taps, C)` of the newly accepted tokens."""
        raise NotImplementedError


class MedusaDrafter(DraftHeadDrafter):
    """Drafts all tokens at once from the last hidden state."""

    name = "medusa"
    runner: MedusaRunner

    def forget(self) -> None:
        self.last: Array | None = None

    def see(self, features: Array) -> None:
        if len(features):
            self.last = features[-1, -1]

    def propose(self, most: int) -> Draft:
        self.take()
        if self.last is None:
            return NO_DRAFT
        return self.likely(self.runner.draft(self.last), most)


class Eagle3Drafter(DraftHeadDrafter):
    """Runs its layer over the accepted tokens, then over its own drafted tokens."""

    name = "eagle3"
    runner: Eagle3Runner

    def forget(self) -> None:
        self.waiting: list[Array] = []
        self.runner.forget()

    def see(self, features: Array) -> None:
        self.waiting.append(features)

    def read(self) -> None:
        """Read a prompt as soon as the target has read it: later, an answer would have to pay for
        this before its first draft. The last hidden state waits for the token after it."""
        self.take()
        if self.unread > 1:
            features = np.concatenate(self.waiting)
            after = self.after(len(features) - 1)
            self.runner.read(features[:-1], after)
            self.waiting = [features[-1:]]

    @property
    def unread(self) -> int:
        assert self.taps is not None and self.session is not None
        return sum(map(len, self.waiting)) + self.session.position - self.taps.taken

    def propose(self, most: int) -> Draft:
        self.take()
        features = np.concatenate(self.waiting)
        after = self.after(len(features))
        if not len(features) or len(after) < len(features):
            return NO_DRAFT
        self.waiting = []
        return self.likely(self.rows(features, after), most)

    def after(self, count: int) -> list[int]:
        """The tokens after the next `count` hidden states, as far as they are known."""
        start = self.base + self.runner.done + 1
        return self.tokens[start : start + count]

    def rows(self, features: Array, after: Sequence[int]) -> Iterator[Array]:
        """Logits after the accepted tokens, then after each of its own best tokens: as many rows as
        it was trained for."""
        runner = self.runner
        logits = runner.follow(features, after)
        yield logits
        for _ in range(min(runner.room, runner.steps - 1)):
            logits = runner.step(int(runner.vocabulary[logits.argmax()]))
            yield logits


def open_drafter(draft_head: DraftHead, bundle: Bundle, backend: Backend) -> DraftHeadDrafter:
    """The drafter of a bundle's draft head; `backend` opens its shard."""
    return drafter_of(open_runner(draft_head, bundle, backend))


def drafter_of(runner: MedusaRunner | Eagle3Runner) -> DraftHeadDrafter:
    """A drafter for one sequence. A runner serves one at a time."""
    return MedusaDrafter(runner) if isinstance(runner, MedusaRunner) else Eagle3Drafter(runner)
