"""The interface of drafters, the classes that propose tokens."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cetane.engine.engine import Engine
from cetane.engine.execution import Watch
from cetane.engine.session import Session
from cetane.engine.verify import Draft
from cetane.schema.plan import Plan


@dataclass(frozen=True)
class DraftTimes:
    """The time of a draft, as measured before the first one, in seconds or in plain steps."""

    asking: float
    """The time apart from its own tokens, if no more than `together` tokens of the text are
    unread."""
    token: float
    """The time of each of its tokens."""
    together: int = 1
    """The unread tokens that its first call takes."""
    reads: tuple[tuple[int, float], ...] = ()
    """The calls that can read further ones: the tokens that one takes, and its time."""

    def draft(self, tokens: float, unread: int) -> float:
        """The time of a draft of `tokens` tokens, perhaps a mean, after `unread` unread ones."""
        return self.asking + self.token * tokens + self.reading(unread)

    def reading(self, unread: int) -> float:
        """The time for the unread tokens that its first call does not take. Later drafts need not
        repeat it."""
        more = max(0, unread - self.together)
        return min((-(-more // tokens) * time for tokens, time in self.reads), default=0.0)

    def scaled(self, factor: float) -> "DraftTimes":
        """The times in another unit."""
        reads = tuple((tokens, time * factor) for tokens, time in self.reads)
        return DraftTimes(self.asking * factor, self.token * factor, self.together, reads)


class Drafter(ABC):
    """Follows one sequence, and proposes its next tokens.

    Proposals may be wrong, short or empty: the target verifies them.
    """

    name: ClassVar[str]
    costly: ClassVar[bool] = False
    """Whether a proposal takes much time, compared with a call of the target."""
    always: ClassVar[bool] = False
    """Whether its drafts are verified even where they do not pay."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.trees = False
        """Whether the session takes trees, so that drafts may be trees."""
        self.stop: Collection[int] = ()
        """The tokens that end an answer. It need not draft them, since nothing follows them."""
        self.tokens: list[int] = []
        """The sequence. After a step, the session holds all its tokens but the last."""

    def watch(self, plan: Plan) -> Watch | None:
        """The watch that the next session needs, so that this drafter can follow it.

        None for a drafter that reads only tokens.
        """
        return None

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        """Called before the target's session is fed these tokens; a server's session holds them
        already.

        With the session that it followed last, a drafter continues; with another it starts anew.
        """
        if session is not self.session:
            self.session, self.tokens = session, []
            self.forget()
        self.trees = session.no_trees is None
        del self.tokens[session.position :]
        self.extend(tokens)

    def forget(self) -> None:  # noqa: B027 - some have nothing to do
        """Forget the sequence: a new one begins."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Called when the sequence continues with these tokens."""
        self.tokens.extend(tokens)

    def read(self) -> None:  # noqa: B027
        """Called when the session holds a prompt, before the first token comes: what is read now
        delays no later one."""

    @property
    def unread(self) -> int:
        """Tokens that it reads before its next proposal, if that takes time."""
        return 0

    @property
    def times(self) -> DraftTimes | None:
        """In seconds. None for a look-up, and before they are measured: a costly drafter measures
        them when it opens, or else before its first draft."""
        return None

    def made(self, draft: Draft) -> int:
        """The tokens of its last draft that took time: in a tree, others come with them."""
        return len(draft.tokens)

    @abstractmethod
    def propose(self, most: int) -> Draft:
        """The likeliest next tokens, at most `most`; an empty draft if it knows none."""

    def end(self) -> None:  # noqa: B027
        """Called when a text is complete for now."""

    def close(self) -> None:  # noqa: B027
        """Called when no more drafts are needed."""


def watches(plan: Plan, drafters: Sequence[Drafter]) -> list[Watch]:
    """The watches of a new session that these drafters can follow."""
    return [seen for drafter in drafters if (seen := drafter.watch(plan)) is not None]


def open_session(engine: Engine, drafters: Sequence[Drafter]) -> Session:
    """A new session that these drafters can follow: draft heads see its hidden states."""
    watch = watches(engine.plan, drafters)
    return engine.session(watch=watch, whole=bool(watch))
