"""Generation: from a prompt to tokens, on a session."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Literal, Protocol

from cetane.engine.backend import Array
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft, verify

Ending = Literal["stop", "length", "context"]
"""The reason why a generation ended: a stop token, `max_new` tokens, or a full context."""


class DraftSource(Protocol):
    """A source of drafts for one sequence."""

    def begin(self, session: Session, tokens: Sequence[int], stop: Sequence[int] = ()) -> None:
        """Called before the session is fed these tokens and generates. `stop` end the answer."""

    def read(self) -> None:
        """Called when the session holds these tokens, before the first new one comes."""

    def draft(self, new: Sequence[int], most: int) -> Draft:
        """A draft of at most `most` tokens after `new`; the last of `new` was not yet fed."""

    def settle(self, draft: Draft, new: Sequence[int], seconds: float) -> None:
        """Called after the step with this draft, which gave the tokens `new`."""

    def end(self, new: Sequence[int]) -> None:
        """Called at the end of a generation, however it ends; no tokens follow `new`."""


def generate(
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    max_new: int,
    stop: Sequence[int] = (),
    drafts: DraftSource | None = None,
) -> Generator[int, None, Ending]:
    """Feed the prompt, then yield up to `max_new` tokens.

    A stop token ends the generation, and is not yielded. A full context ends it too.
    Returns the reason. The session holds every yielded token but the last: feed that first when
    the conversation goes on. `drafts` change only the speed.
    """
    if drafts is not None:
        drafts.begin(session, prompt, stop)
    logits = session.feed(prompt)
    if not max_new:
        return "length"
    assert logits is not None
    return (yield from extend(session, logits, sampler, max_new, stop, drafts))


def extend(
    session: Session,
    logits: Array,
    sampler: Sampler,
    max_new: int,
    stop: Sequence[int] = (),
    drafts: DraftSource | None = None,
    note: Callable[[int, Array], None] | None = None,
) -> Generator[int, None, Ending]:
    """Generate as `generate` does, after a prompt that the session holds.

    `logits` are those after the prompt, `(V,)`. `drafts` have begun. `note` is called with every
    new token, a stop token too, and the logits from which it was chosen, before the token is
    yielded.
    """
    if drafts is not None:
        drafts.read()
    new, rows, path, left = [sampler(logits)], logits[None], [0], max_new
    sampler.keep(new[0])
    said: list[int] = []
    try:
        while True:
            if note is not None:
                for token, place in zip(new, path, strict=False):
                    note(token, rows[place])
            said = until(new, stop)
            yield from said
            left -= len(said)
            stopped = len(said) < len(new)
            if stopped or not left or session.position == session.context:
                return "stop" if stopped else "context" if left else "length"
            started = time.perf_counter()
            most = min(left, max(session.widths, default=1)) - 1
            said = []  # the drafts take these tokens
            draft = NO_DRAFT if drafts is None else drafts.draft(new, most)
            parents = [-1, *(parent + 1 for parent in draft.parents)]
            rows = session.evaluate([new[-1], *draft.tokens], parents)
            new = verify(rows, draft, sampler)[:left]
            new = new[: len(until(new, stop)) + 1]
            path = [0, *(place + 1 for place in draft.path(new[:-1]))]
            session.accept_path(path)
            if drafts is not None:
                drafts.settle(draft, new, time.perf_counter() - started)
    finally:  # also if the reader has enough, or Ctrl-C comes within a step
        if drafts is not None:
            drafts.end(said)


def until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens before the first stop token."""
    return next((tokens[:i] for i, token in enumerate(tokens) if token in stop), tokens)
