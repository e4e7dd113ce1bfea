"""The one interface of everything that proposes tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from cetane.engine.engine import Session
from cetane.engine.verify import Draft


class Drafter(ABC):
    """Follows one sequence, and proposes what may come next.

    Proposals may be wrong, short or empty: whoever asks verifies them.
    """

    name: ClassVar[str]
    costly: ClassVar[bool] = False
    """Whether a proposal takes so long that it must be worth asking for."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.tokens: list[int] = []
        """The sequence; after a step all but the last token are in the session."""

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        """The target's session is about to be fed these tokens.

        A drafter that followed this session before goes on; of another session it knows nothing.
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
        """At most `most` tokens that may come next, the likeliest; none is an answer too."""

    def end(self) -> None:  # noqa: B027
        """The text is complete for now."""

    def close(self) -> None:  # noqa: B027
        """Nothing will be asked any more."""
