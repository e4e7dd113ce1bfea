"""The speculator: drafters and a controller at work on one sequence, with their counters."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cetane.engine.call import line
from cetane.engine.engine import Engine
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft, grafted
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
    read_seconds: float = 0.0
    """Seconds that the drafters took before the first new tokens, to read the prompts."""
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
    """Asks its drafters, and verifies the most promising draft; of equals, the first.

    A call has a fixed width. Where its cost depends only on that width (`Session.counts`), spare
    columns are free. If the session takes trees, other drafts branch off in these columns. A costly
    drafter is asked only if it promises more than the others' drafts. Without a controller the
    longest draft is verified.
    """

    def __init__(
        self, drafters: Sequence[Drafter], longest: int, controller: Controller | None = None
    ) -> None:
        """`longest`: the most tokens of a draft."""
        if longest < 1:
            raise CetaneError(f"drafts of {longest} tokens: need at least 1")
        self.drafters = tuple(sorted(drafters, key=lambda drafter: drafter.costly))
        if any(drafter.always for drafter in self.drafters):
            controller = None
        self.longest, self.controller = longest, controller
        if controller:  # else an answer would pay for a first draft that it cannot afford
            for drafter in self.drafters:
                if (times := drafter.times) is not None:
                    controller.take_times(drafter.name, times)
        self.counters = Counters()
        self.possible: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """The tokens that the target can choose."""
        self.useful = self.possible
        """Those of them after which an answer goes on. A draft of another saves no call."""
        self.trees = False
        """Whether the session takes trees."""
        self.resting = False
        """Whether it follows the text and drafts nothing."""
        self.unseen: list[int] = []
        """New tokens that no drafter has seen yet."""
        self.last = NO_DRAFT
        """The draft that the last step verified."""
        self.proposals: list[Draft] = []
        """The drafts of this step."""
        self.proposing = 0.0
        """Seconds that the drafters took in this step."""

    def session(self, engine: Engine) -> Session:
        """A new session of the target, which all drafters can follow."""
        return open_session(engine, self.drafters)

    def begin(self, session: Session, tokens: Sequence[int], stop: Sequence[int] = ()) -> None:
        started = time.perf_counter()
        if not len(self.possible):
            self.possible = np.isin(np.arange(session.plan.vocab), session.plan.choosable)
        self.useful = self.possible.copy()
        self.useful[[token for token in stop if token < len(self.useful)]] = False
        self.trees = session.no_trees is None
        self.unseen, self.last = [], NO_DRAFT
        for drafter in self.drafters:
            drafter.stop = stop
            drafter.begin(session, tokens)
        if self.controller:
            self.controller.begin()
        self.counters.read_seconds += time.perf_counter() - started

    def read(self) -> None:
        started = time.perf_counter()
        for drafter in self.drafters:
            drafter.read()
        self.counters.read_seconds += time.perf_counter() - started

    def draft(self, new: Sequence[int], most: int) -> Draft:
        started = time.perf_counter()
        most = 0 if self.resting else min(most, self.longest)
        self.proposals = []
        self.unseen += new
        solvent = self.controller is None or self.controller.solvent(most)
        if solvent or self.last.tokens:  # else new tokens wait, since a look costs time
            self.show()
        for drafter in self.drafters if solvent else ():
            if (draft := self.ask(drafter, most)).tokens:
                self.proposals.append(draft)
        if self.controller:  # before the controller is asked what is affordable
            self.controller.spent += time.perf_counter() - started
        self.last = self.filled(self.pick(self.proposals), most)
        self.proposing = time.perf_counter() - started
        self.counters.draft_seconds += self.proposing
        return self.last

    def show(self) -> None:
        """Show the drafters the new tokens: after a verified draft at once, while the session knows
        which columns it accepted."""
        for drafter in self.drafters:
            drafter.extend(self.unseen)
        self.unseen = []

    def ask(self, drafter: Drafter, most: int) -> Draft:
        """A drafter's draft, cut if it is too long, and before a token that the target cannot
        choose, or after which nothing comes. Which tokens of a drawn draft are judged must not
        depend on what was drawn, so it keeps the latter."""
        if self.controller and drafter.costly:
            most = self.worth(drafter, most, self.controller)
        if most < 1:
            return NO_DRAFT
        started, unread = time.perf_counter(), drafter.unread
        draft = drafter.propose(most).first(most)
        if self.controller and (times := drafter.times) is not None:
            seconds = time.perf_counter() - started
            self.controller.take_times(drafter.name, times)
            if draft.tokens:  # a drafter that says nothing shows no cost
                self.controller.proposed(drafter.name, most, drafter.made(draft), seconds, unread)
        kept = self.useful if draft.distributions is None else self.possible
        fine = (0 <= token < len(kept) and kept[token] for token in draft.tokens)
        return draft.first(next((i for i, one in enumerate(fine) if not one), most))

    def worth(self, drafter: Drafter, most: int, controller: Controller) -> int:
        """The number of tokens that a costly drafter should draft; 0 if the drafts of this step
        promise as much as its own."""
        name = drafter.name
        count = controller.length(name, line(most), name, drafter.unread)
        if count and (others := self.pick(self.proposals)).tokens:
            promised = controller.gain(name, line(count), controller.drafting_seconds(name, count))
            if promised <= controller.gain(others.kind, others.parents):
                count = 0
        if not count:
            controller.skip(name)
        return count

    def pick(self, drafts: Sequence[Draft]) -> Draft:
        """The draft to verify, cut to its most promising length."""
        controller, best, gain = self.controller, NO_DRAFT, 0.0
        for draft in drafts:
            if controller is None:
                if len(draft.tokens) > len(best.tokens):
                    best = draft
                continue
            length = controller.length(draft.kind, draft.parents)
            cut = draft.first(length)
            promised = controller.gain(cut.kind, cut.parents) if length else 0.0
            if promised > gain:
                best, gain = cut, promised
        return best

    def filled(self, best: Draft, most: int) -> Draft:
        """The draft with branches of the others, in the columns that its call has to spare."""
        drafted = len(best.tokens)
        if not drafted or not self.trees or best.distributions is not None:
            return best
        width = self.controller.width(1 + drafted) if self.controller else None
        room = most if width is None else min(most, width - 1)
        for other in self.proposals:
            if other.distributions is None and len(best.tokens) < room:
                best = grafted(best, other, room)
        return best

    def settle(self, draft: Draft, new: Sequence[int], seconds: float) -> None:
        drafted, accepted = len(draft.tokens), len(draft.path(new))
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
            self.controller.settle(drafted, len(new), seconds - self.proposing)
            for proposal in self.proposals:
                self.controller.judge(proposal, new, proposal.kind == draft.kind)

    def end(self, new: Sequence[int]) -> None:
        self.unseen += new
        self.show()
        for drafter in self.drafters:
            drafter.end()

    def close(self) -> None:
        """Close the drafters after the last generation; they save what they have learned."""
        for drafter in self.drafters:
            drafter.close()

    def summary(self) -> dict[str, Any]:
        """The counters, and the acceptance at which drafts pay, from measured times."""
        even = self.controller.break_even(self.longest) if self.controller else None
        return self.counters.summary() | {"break_even_acceptance": even}
