"""The speculator: drafters and a controller at work on one sequence, with their counters."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cetane.engine.engine import Engine
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.speculate.controller import Controller
from cetane.speculate.drafter import Drafter, open_session


@dataclass
class Counters:
    """Counts of steps and tokens. The names are those of the two published ports' runtimes."""

    verifier_calls: int = 0
    """Steps with a draft."""
    fallbacks: int = 0
    """Plain steps, without a draft."""
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    calls: Counter[int] = field(default_factory=Counter)
    """Verifying calls by their number of tokens: the drafted ones, and the one before them."""

    def summary(self) -> dict[str, Any]:
        """The counters, with acceptance and tokens per verifying call."""
        calls = self.verifier_calls
        return {name: value for name, value in asdict(self).items() if name != "calls"} | {
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "tokens_per_call": 1 + self.accepted / calls if calls else None,
        }


class Speculator:
    """Asks all drafters, and verifies the most promising draft; of equals, the first.

    Without a controller it verifies the longest draft.
    """

    def __init__(
        self, drafters: Sequence[Drafter], longest: int, controller: Controller | None = None
    ) -> None:
        """`longest`: the most tokens of a draft."""
        if longest < 1:
            raise CetaneError(f"drafts of {longest} tokens: need at least 1")
        self.drafters, self.longest, self.controller = tuple(drafters), longest, controller
        self.counters = Counters()
        self.possible: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """The tokens that the target can choose."""
        self.proposing = 0.0
        """Seconds that the drafters took in this step."""

    def session(self, engine: Engine) -> Session:
        """A new session of the target, which all drafters can follow."""
        return open_session(engine, self.drafters)

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        self.possible = np.isin(np.arange(session.plan.vocab), session.plan.choosable)
        for drafter in self.drafters:
            drafter.begin(session, tokens)
        if self.controller:
            self.controller.begin()

    def draft(self, new: Sequence[int], most: int) -> Draft:
        started = time.perf_counter()
        most = min(most, self.longest)
        drafts = []
        for drafter in self.drafters:
            drafter.extend(new)
            drafts.append(self.ask(drafter, most))
        if self.controller:  # before the controller is asked what is affordable
            self.controller.spent += time.perf_counter() - started
        best = self.pick(drafts)
        self.proposing = time.perf_counter() - started
        self.counters.draft_seconds += self.proposing
        return best

    def ask(self, drafter: Drafter, most: int) -> Draft:
        """A drafter's draft, cut if it is too long, and before a token that the target cannot
        choose."""
        if self.controller and drafter.costly:
            most = self.controller.length(
                drafter.name, most, self.controller.drafting[drafter.name].seconds
            )
            if not most:
                self.controller.skip(drafter.name)
        if most < 1:
            return NO_DRAFT
        started = time.perf_counter()
        draft = drafter.propose(most).first(most)
        if self.controller:
            self.controller.proposed(drafter.name, len(draft.tokens), time.perf_counter() - started)
        size = len(self.possible)
        chosen = (0 <= token < size and self.possible[token] for token in draft.tokens)
        return draft.first(next((i for i, possible in enumerate(chosen) if not possible), most))

    def pick(self, drafts: Sequence[Draft]) -> Draft:
        """The draft to verify, cut to its most promising length."""
        controller, best, gain = self.controller, NO_DRAFT, 0.0
        for draft in drafts:
            if controller is None:
                if len(draft.tokens) > len(best.tokens):
                    best = draft
            elif draft.tokens:
                length = controller.length(draft.kind, len(draft.tokens))
                promised = controller.gain(draft.kind, length, 0.0)
                if not length:
                    controller.skip(draft.kind)
                elif promised > gain:
                    best, gain = draft.first(length), promised
        return best

    def settle(self, draft: Draft, new: Sequence[int], seconds: float) -> None:
        drafted = len(draft.tokens)
        accepted = sum(one == other for one, other in zip(draft.tokens, new, strict=False))
        counters = self.counters
        counters.tokens += len(new)
        counters.drafted += drafted
        counters.accepted += accepted
        if drafted:
            counters.verifier_calls += 1
            counters.calls[1 + drafted] += 1
        else:
            counters.fallbacks += 1
        if self.controller:
            self.controller.settle(draft.kind, drafted, accepted, seconds - self.proposing)

    def end(self, new: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.extend(new)
            drafter.end()

    def close(self) -> None:
        """Close the drafters after the last generation; they save what they have learned."""
        for drafter in self.drafters:
            drafter.close()

    def summary(self) -> dict[str, Any]:
        """The counters, and the acceptance at which drafts pay, from measured times."""
        even = self.controller.break_even(self.longest) if self.controller else None
        return self.counters.summary() | {"break_even_acceptance": even}
