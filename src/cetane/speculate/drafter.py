"""The one interface of everything that proposes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from cetane.engine.engine import Engine
from cetane.engine.execution import Watch
from cetane.engine.session import Session
from cetane.engine.verify import Draft
from cetane.schema.plan import Plan


class Drafter(ABC):
    """Follows one sequence, and proposes what may come next.

    Proposals may be wrong, short or empty: the target verifies them.
    """

    name: ClassVar[str]
    costly: ClassVar[bool] = False
    """Whether a proposal takes time that matters beside a call of the target."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.tokens: list[int] = []
        """The sequence; after a step all but the last token are in the session."""

    def watch(self, plan: Plan) -> Watch | None:
        """What the next session must call with every output, for this drafter to follow it; None
        for a drafter that reads tokens only."""
        return None

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        """The target's session is about to be fed these tokens.

        A drafter goes on with the session that it followed last; with another one it starts anew.
        """
        if session is not self.session:
            self.session, self.tokens = session, []
            self.forget()
        del self.tokens[session.position :]
        self.extend(tokens)

    def forget(self) -> None:  # noqa: B027 - some have nothing to do
        """A new sequence begins."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence went on with these tokens."""
        self.tokens.extend(tokens)

    @abstractmethod
    def propose(self, most: int) -> Draft:
        """The likeliest next tokens, at most `most`; an empty draft where it knows none."""

    def end(self) -> None:  # noqa: B027
        """The text is complete for now."""

    def close(self) -> None:  # noqa: B027
        """No more drafts will be asked for."""


def open_session(engine: Engine, drafters: Sequence[Drafter]) -> Session:
    """A new session that some drafters can follow: draft heads see its hidden states."""
    watch = [seen for drafter in drafters if (seen := drafter.watch(engine.plan)) is not None]
    return engine.session(watch=watch, whole=bool(watch))
