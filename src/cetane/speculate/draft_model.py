"""A drafter that runs a smaller model with the same tokens."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.memory import Mark
from cetane.engine.prefixes import common_start
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.drafter import Drafter, DraftTimes
from cetane.speculate.timing import timed


class DraftModel(Drafter):
    """Runs a second bundle beside the target's, and rewinds when its draft is refused.

    It shares the target's `sampler`: if the target samples, so does the draft. It draws only what
    the target can choose. A draft that ended before any other token would end by chance, and the
    target's answers would no longer have the target's distribution.
    """

    name = "model"
    costly = True

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        super().__init__()
        self.engine, self.sampler = engine, sampler
        self.measured = self.try_out()

    def try_out(self) -> DraftTimes:
        """Run calls of every width, so that none is prepared within an answer, and all times are
        known."""
        session = self.engine.session()
        start = session.mark()

        def call(width: int) -> None:
            session.feed([0] * width)
            session.rewind(start)

        seconds = timed(session.widths, call)
        reads = tuple((width, median(times)) for width, times in seconds.items())
        return DraftTimes(asking=0.0, token=reads[0][1], reads=reads)

    @property
    def times(self) -> DraftTimes:
        return self.measured

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        self.impossible = np.setdiff1d(np.arange(session.plan.vocab), session.plan.choosable)
        super().begin(session, tokens)

    def forget(self) -> None:
        self.own = self.engine.session()
        self.fed: list[int] = []
        self.marks: dict[int, Mark] = {}

    @property
    def unread(self) -> int:
        return max(0, len(self.tokens) - len(self.fed))

    def read(self) -> None:
        """Read a prompt as soon as the target has read it: later, an answer would have to pay for
        this before its first draft."""
        self.go_back()
        if len(self.tokens) <= self.own.context:
            self.own.feed(self.tokens[len(self.fed) :], "none")
            self.fed = list(self.tokens)

    def propose(self, most: int) -> Draft:
        most = min(most, self.own.context - len(self.tokens))
        if most < 1:
            return NO_DRAFT
        self.go_back()
        logits = self.feed(self.tokens[len(self.fed) :])
        self.fed = list(self.tokens)
        drafted: list[int] = []
        distributions = []
        while True:
            if self.sampler.temperature:
                distributions.append(self.sampler.probabilities(logits))
            drafted.append(self.sampler(logits))
            if len(drafted) == most or drafted[-1] in self.stop:
                break
            self.marks[len(self.fed)] = self.own.mark()
            logits = self.feed(drafted[-1:])
            self.fed.append(drafted[-1])
        drawn_from = np.stack(distributions) if distributions else None
        return Draft(tuple(drafted), self.name, drawn_from)

    def feed(self, tokens: Sequence[int]) -> Array:
        """Its own logits `(V,)` after more tokens, for what the target can choose."""
        logits = self.own.feed(tokens)
        assert logits is not None
        logits[self.impossible] = -np.inf
        return logits

    def go_back(self) -> None:
        """Rewind to the last common token of its own text and the target's.

        The text's last token is always fed again, since its logits give the next token.
        """
        common = common_start(self.fed, self.tokens[:-1])
        if common < len(self.fed):
            mark = self.marks.get(common)
            if mark is None:  # a new text
                self.forget()
                return
            self.own.rewind(mark)
            del self.fed[common:]
        self.marks = {}
