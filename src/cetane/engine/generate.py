"""From a prompt to tokens."""

import sys
from collections.abc import Iterator, Sequence

from cetane.bundle import Bundle
from cetane.engine.backend import Backend
from cetane.engine.coreml import CoreMLBackend
from cetane.engine.engine import Engine, Session
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError

BACKENDS = ("auto", "portable", "coreml")


def open_engine(bundle: Bundle, backend: str = "auto") -> Engine:
    """An engine for a bundle; `auto` is Core ML on a Mac and our own executor elsewhere, in the
    fastest arithmetic it has."""
    if backend not in BACKENDS:
        raise CetaneError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    native = backend == "coreml" or (backend == "auto" and sys.platform == "darwin")
    chosen: Backend = CoreMLBackend(bundle) if native else PortableBackend(bundle, "int8")
    return Engine(bundle.plan, chosen, bundle.tables())


def generate(
    session: Session,
    prompt: Sequence[int],
    sampler: Sampler,
    max_new: int,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """Feed the prompt, then yield up to `max_new` tokens; a stop token ends it, unyielded.

    Also ends when the context is full. Every token that was yielded is in the session, except the
    last: feed it first when the conversation goes on.
    """
    logits = session.feed(prompt)
    for count in range(max_new):
        assert logits is not None
        token = sampler(logits)
        if token in stop:
            return
        yield token
        if count + 1 == max_new or session.position == session.context:
            return
        logits = session.feed([token])
