"""TriForce (arXiv 2404.11912): the model drafts for itself, with a small part of its keys.

The draft runs the bundle's own functions of the smallest capacity, whose weights are there anyway.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.chosen_memory import ChosenMemory
from cetane.engine.execution import Execution
from cetane.engine.schedule import Schedule
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.schema.plan import Plan
from cetane.speculate.drafter import DraftTimes
from cetane.speculate.network import NetworkDrafter
from cetane.speculate.timing import RECENT

SINKS, NEWEST = 1 / 32, 3 / 8
"""The shares of the slots for the first tokens of a text, and for its newest."""
EVERY = 16
"""Slots are chosen again after so many new tokens. While the model copies a passage, the place that
it copies from moves on. A choice made once would lose it."""
BEFORE, AFTER = 8, 64
"""The tokens around a match that are kept. What follows it is what a text repeats."""
LONGEST = 8
"""The most tokens of a match that count."""
WAIT = RECENT
"""The new tokens before the first draft. Their steps tell the controller what a step costs in a
text of this length. Compared with a step in a short text, drafts look too dear, and none would
follow."""

PORT = "port with --set cache.contract=readonly --set 'cache.capacities=[512]' --context 8192"


class TriForce(NetworkDrafter):
    """Runs the target itself in its smallest capacity, on a part of the target's caches.

    That part is the first tokens, the newest ones, and the surroundings of earlier matches of the
    text's last tokens. It drafts once the text fills that capacity, but not within the first `WAIT`
    tokens of an answer. Drafts are the model's best tokens, never drawn at random.
    """

    name = "triforce"

    def __init__(self, plan: Plan) -> None:
        """Raises CetaneError for a plan that `refusal` refuses."""
        super().__init__()
        if (error := self.refusal(plan)) is not None:
            raise error
        self.vocabulary = plan.choosable
        self.measured: DraftTimes | None = None
        """The times of its drafts, from the first long text on."""

    @staticmethod
    def refusal(plan: Plan) -> CetaneError | None:
        """Why a plan cannot draft for itself: it has one capacity, or the host does not keep its
        caches. None if it can."""
        written = [name for name, slots in plan.caches.items() if slots.contract != "readonly"]
        if written:
            contract = plan.caches[written[0]].contract
            return CetaneError(
                f"triforce gathers columns of caches that the host keeps, but {written[0]} has the "
                f"contract {contract}",
                f"{PORT}; a recipe's cache.sliding must be readonly too",
            )
        if not plan.smaller:
            return CetaneError(
                "triforce needs a smaller capacity to draft in, and the bundle has only "
                f"{plan.recipe.cache.context} tokens",
                PORT,
            )
        return None

    @property
    def times(self) -> DraftTimes | None:
        return self.measured

    def forget(self) -> None:
        session = self.session
        assert session is not None
        self.smallest = session.plan.capacities[0]
        slots = self.smallest.tokens
        self.sinks, self.newest = int(slots * SINKS), int(slots * NEWEST)
        whole, execution = session.memory, session.execution
        self.memory = ChosenMemory(
            whole, self.smallest, execution.functions.values(), slots - self.newest
        )
        self.own = Session(
            Schedule(session.plan),
            self.memory,
            Execution(execution.functions, execution.shards, execution.tables, self.memory),
            session.head,
        )

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        super().begin(session, tokens)
        self.first = len(self.tokens) + WAIT
        """The length of the text from which it drafts."""
        self.due = 0
        """The position from which slots must be chosen again."""

    def read(self) -> None:
        assert self.session is not None
        full = self.session.position == self.session.context
        if self.catch_up() and not full and self.measured is None:
            self.measure()

    def measure(self) -> None:
        """Measure the seconds of a drafted token. A first call may prepare the function, so the
        second counts."""
        took = 0.0
        for _ in range(2):
            started = time.perf_counter()
            self.own.feed(self.tokens[-1:])
            took = time.perf_counter() - started
            self.memory.follow()
        self.measured = DraftTimes(asking=0.0, token=took)

    def catch_up(self) -> bool:
        """Bring the part memory up to the target's position. False if the text does not fill the
        smallest capacity yet."""
        assert self.session is not None
        self.own.adapter = self.session.adapter
        position = self.session.position
        if position < self.smallest.tokens:
            return False
        if position < self.due:
            self.memory.follow()
        else:
            self.memory.choose(self.places(position))
            self.due = position + EVERY
        return True

    def places(self, position: int) -> Array:
        """The positions of the chosen tokens, ascending: the first ones, then the rest by score."""
        room = self.smallest.tokens - self.newest - self.sinks
        scores = repeated(np.array(self.tokens[: position + 1]))[
            self.sinks : position - self.newest
        ]
        best = np.argsort(-scores, kind="stable")[:room]
        return np.concatenate([np.arange(self.sinks), self.sinks + np.sort(best)])

    def propose(self, most: int) -> Draft:
        if len(self.tokens) < self.first or not self.catch_up():
            return NO_DRAFT
        if self.measured is None:  # the prompt was short: no draft before its cost is known
            self.measure()
            return NO_DRAFT
        return self.likely(self.rows(), most)

    def rows(self) -> Iterator[Array]:
        """Logits after the text's last token, then after each of its own best tokens."""
        token = self.tokens[-1]
        while True:
            logits = self.own.feed([token])
            assert logits is not None
            rows = logits[self.vocabulary]
            yield rows
            token = int(self.vocabulary[rows.argmax()])


def repeated(tokens: Array) -> Array:
    """How much each token of a text may serve what comes next, `(n,)`.

    Tokens around an earlier match of the last tokens score the match's length; of equal lengths,
    later places score more.
    """
    count = len(tokens)
    late = np.arange(count) / count
    scores, length = late * 0.5, np.zeros(count, int)
    same = np.ones(count, bool)
    for back in range(min(LONGEST, count)):
        same[:back] = False
        same[back:] &= tokens[: count - back] == tokens[count - 1 - back]
        length += same
    for place in np.flatnonzero(length[:-1]):
        around = slice(max(0, place - BEFORE), place + AFTER)
        scores[around] = np.maximum(scores[around], length[place] + late[place])
    return scores
