"""A smaller model with the same tokens drafts what a larger one verifies."""

from collections.abc import Sequence

import numpy as np

from cetane.engine.engine import Engine, Mark, Session
from cetane.engine.sampling import Sampler
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.drafter import Drafter


class DraftModel(Drafter):
    """Runs a bundle of its own beside the target's, and goes back where its draft was refused.

    Where the target samples, so does the draft, with the same settings: `sampler`.
    """

    name = "model"
    costly = True

    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.engine, self.sampler = engine, sampler
        self.target: Session | None = None
        self.tokens: list[int] = []

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        if session is not self.target:
            self.target, self.session = session, self.engine.session()
            self.tokens = []
            self.fed: list[int] = []
            self.marks: dict[int, Mark] = {}
        self.tokens.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def propose(self, most: int) -> Draft:
        most = min(most, self.session.context - len(self.tokens))
        if most < 1:
            return NO_DRAFT
        self.go_back()
        logits = self.session.feed(self.tokens[len(self.fed) :])
        assert logits is not None
        self.fed = list(self.tokens)
        drafted: list[int] = []
        distributions = []
        while True:
            if self.sampler.temperature:
                distributions.append(self.sampler.probabilities(logits))
            drafted.append(self.sampler(logits))
            if len(drafted) == most:
                break
            self.marks[len(self.fed)] = self.session.mark()
            logits = self.session.feed(drafted[-1:])
            assert logits is not None
            self.fed.append(drafted[-1])
        drawn_from = np.stack(distributions) if distributions else None
        return Draft(tuple(drafted), self.name, drawn_from)

    def go_back(self) -> None:
        """To the last token that the draft and the text have in common, but not all of the text:
        its last token gives the next."""
        pairs = zip(self.fed, self.tokens[:-1], strict=False)
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if common is None:
            common = min(len(self.fed), len(self.tokens) - 1)
        if common < len(self.fed):
            self.session.rewind(self.marks[common])
            del self.fed[common:]
        self.marks = {}
