"""How often drafters know the next token, asked at every position of greedy answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from cetane.checkpoint import Tokenizer
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.prompts import conversations
from cetane.speculate.drafter import Drafter, open_session

Ids = Sequence[int]


@dataclass
class FirstTokens:
    """Counts how often a drafter knows the next token of greedy answers; a `DraftSource`.

    It asks the drafter after every token and drafts nothing, so all drafters are asked at the same
    positions. A token that ends an answer counts as any other.
    """

    drafter: Drafter
    proposed: list[bool] = field(default_factory=list)
    """Whether the drafter had a proposal, at every position."""
    right: list[bool] = field(default_factory=list)
    """Whether the proposal's first token was the target's choice, at every position."""
    said: tuple[int, ...] = ()
    """The first token of the last proposal; empty for none."""

    def begin(self, session: Session, tokens: Ids, stop: Ids = ()) -> None:
        self.drafter.begin(session, tokens)

    def read(self) -> None:
        self.drafter.read()

    def draft(self, new: Ids, most: int) -> Draft:
        self.drafter.extend(new)
        self.said = self.drafter.propose(1).tokens[:1]
        return NO_DRAFT

    def settle(self, draft: Draft, new: Ids, seconds: float) -> None:
        self.proposed.append(bool(self.said))
        self.right.append(self.said == tuple(new[:1]))

    def end(self, new: Ids) -> None:
        self.drafter.extend(new)
        self.drafter.end()

    def share(self, where: Sequence[bool] | None = None) -> float | None:
        """The share of positions at which its first token would be accepted.

        `where` marks the positions that count; by default all do.
        """
        asked = self.right if where is None else list(compress(self.right, where))
        return sum(asked) / len(asked) if asked else None


class AskedTogether:
    """Several drafters, each asked at every position; a `DraftSource`."""

    def __init__(self, asked: Sequence[FirstTokens]) -> None:
        self.asked = asked

    def begin(self, session: Session, tokens: Ids, stop: Ids = ()) -> None:
        for one in self.asked:
            one.begin(session, tokens)

    def read(self) -> None:
        for one in self.asked:
            one.read()

    def draft(self, new: Ids, most: int) -> Draft:
        for one in self.asked:
            one.draft(new, most)
        return NO_DRAFT

    def settle(self, draft: Draft, new: Ids, seconds: float) -> None:
        for one in self.asked:
            one.settle(draft, new, seconds)

    def end(self, new: Ids) -> None:
        for one in self.asked:
            one.end(new)


def first_tokens_by_turn(
    engine: Engine, tokenizer: Tokenizer, drafters: Sequence[Drafter], count: int
) -> list[list[FirstTokens]]:
    """Ask drafters after every token of greedy answers in conversations: by turn, for each drafter.

    They keep what they learn from turn to turn, and from one conversation to the next.
    """
    talks = conversations()
    turns = [[FirstTokens(drafter) for drafter in drafters] for _ in talks[0]]
    for talk in talks:
        said: list[dict[str, str]] = []
        for question, asked in zip(talk, turns, strict=True):
            said.append({"role": "user", "content": question})
            answer = generate(
                open_session(engine, drafters), tokenizer.chat(said), Sampler(), count,
                tokenizer.eos_ids, AskedTogether(asked),
            )  # fmt: skip
            said.append({"role": "assistant", "content": tokenizer.decode(answer)})
    return turns
