"""Draft heads at work: they read what the target's calls hand on."""

from collections.abc import Sequence

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import HeadShard
from cetane.engine.backend import Array, Backend
from cetane.engine.engine import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.drafter import Drafter
from cetane.speculate.heads.features import Taps
from cetane.speculate.heads.runner import Eagle3Runner, HeadRunner, MedusaRunner, open_runner


class HeadDrafter(Drafter):
    """Keeps the hidden states of the sequence for a head, which runs as the bundle's shards do."""

    costly = True

    def __init__(self, runner: HeadRunner) -> None:
        super().__init__()
        self.runner = runner

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        if session is not self.session:
            self.taps = Taps(session, self.runner.head.manifest.taps)
        super().begin(session, tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self.see(self.taps.take())

    def see(self, features: Array) -> None:
        """The hidden states `(n, taps, C)` of the tokens that were accepted last."""
        raise NotImplementedError


class MedusaDrafter(HeadDrafter):
    name = "medusa"
    runner: MedusaRunner

    def forget(self) -> None:
        self.last: Array | None = None

    def see(self, features: Array) -> None:
        if len(features):
            self.last = features[-1, -1]

    def propose(self, most: int) -> Draft:
        if self.last is None:
            return NO_DRAFT
        best = self.runner.draft(self.last).argmax(-1)[:most]
        return Draft(tuple(self.runner.vocabulary[best].tolist()), self.name)


class Eagle3Drafter(HeadDrafter):
    """Runs its layer over what is certain when it is asked, then over its own tokens."""

    name = "eagle3"
    runner: Eagle3Runner

    def forget(self) -> None:
        self.waiting: list[Array] = []
        self.runner.forget()

    def see(self, features: Array) -> None:
        self.waiting.append(features)

    def propose(self, most: int) -> Draft:
        runner, features = self.runner, np.concatenate(self.waiting)
        after = self.tokens[runner.done + 1 : runner.done + 1 + len(features)]
        if not len(features) or len(after) < len(features):
            return NO_DRAFT
        self.waiting = []
        drafted: list[int] = []
        logits = runner.follow(features, after)
        while True:
            drafted.append(int(runner.vocabulary[logits.argmax()]))
            if len(drafted) == min(most, runner.steps) or not runner.room:
                return Draft(tuple(drafted), self.name)
            logits = runner.step(drafted[-1])


def head_drafter(head: HeadShard, bundle: Bundle, backend: Backend) -> HeadDrafter:
    """The drafter of a bundle's head; `backend` opens the head's shard."""
    runner = open_runner(head, bundle, backend)
    return MedusaDrafter(runner) if isinstance(runner, MedusaRunner) else Eagle3Drafter(runner)
