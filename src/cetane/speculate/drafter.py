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

    @abstractmethod
    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        """The target's session has just been fed these tokens.

        A drafter that followed this session before goes on; of another session it knows nothing.
        """

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence went on with these tokens; all but the last are in the session."""

    @abstractmethod
    def propose(self, most: int) -> Draft:
        """At most `most` tokens that may come next, the likeliest; none is an answer too."""

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """The text is complete for now."""

    def close(self) -> None:  # noqa: B027
        """Nothing will be asked any more."""
