"""Answers as they are written: in one session of a model, one answer at a time."""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.generate import Ending, generate
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.errors import CetaneError
from cetane.pipeline.completion import Completion, FinishReason
from cetane.speculate.open import AUTO, DrafterOptions, open_speculator
from cetane.speculate.speculator import Speculator


class CompletionStream(Iterator[str]):
    """The pieces of an answer's text, as they come; every piece is whole characters.

    `completion` is the answer so far. `close` ends it early. A model writes one answer at a time:
    the first piece of the next one ends this one.
    """

    def __init__(
        self,
        session: "AnswerSession",
        ids: Sequence[int],
        most: int,
        settings: Sampler,
        adapter: str | None,
        continues: bool,
    ) -> None:
        """`continues`: whether the answer continues the prompt's text; the answer to a conversation
        is a text of its own."""
        self.ids, self.most, self.settings, self.adapter = ids, most, settings, adapter
        self._decoder = session.bundle.tokenizer.stream(ids if continues else ())
        self._tokens: list[int] = []
        self._seconds = (0.0, 0.0)
        """To the first token, and from there on."""
        self._text = ""
        self._reason: FinishReason = "interrupted"
        self._overtaken = False
        self._pieces = self._write(session)

    @property
    def completion(self) -> Completion:
        """The answer so far."""
        return Completion(
            self._text, tuple(self._tokens), self._reason, len(self.ids), *self._seconds
        )

    def __next__(self) -> str:
        """The next piece. CetaneError after the model has begun another answer."""
        if self._overtaken:
            raise CetaneError(
                "this answer ended when the model began another one",
                "read one answer to its end, or load the bundle twice",
            )
        return next(self._pieces)

    def close(self) -> None:
        """End the generation."""
        self._pieces.close()

    def _overtake(self) -> None:
        """End the generation for another one."""
        self._overtaken = True
        self.close()

    def _write(self, session: "AnswerSession") -> Generator[str, None, None]:
        text = self._decoder
        started = time.perf_counter()
        generation = session.begin(self)
        while True:
            try:
                token = next(generation)
            except StopIteration as end:
                reason: Ending = end.value
                break
            passed = time.perf_counter() - started
            first = self._seconds[0] or passed
            self._seconds = (first, passed - first)
            self._tokens.append(token)
            if piece := text.push(token):
                self._text += piece
                yield piece
        session.end([*self.ids, *self._tokens])
        self._reason = reason
        if piece := text.finish().rstrip("\N{REPLACEMENT CHARACTER}"):  # half a character
            self._text += piece
            yield piece


class AnswerSession:
    """The session in which a model writes its answers, one after the other.

    It remembers the last prompt and answer. A prompt that continues them runs only its new tokens,
    but for an answer with a seed: these tokens would round differently from a prompt run at once.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, backend: str, drafter: DrafterOptions | None
    ) -> None:
        """`drafter` is None for plain decoding."""
        self.bundle, self.engine = bundle, engine
        self._sampler = Sampler()
        self._speculator: Speculator | None = None
        self._drafts_seeded = drafter is not None and drafter.drafter != AUTO
        if drafter is not None:
            self._speculator = open_speculator(drafter, bundle, engine, self._sampler, backend)
        self._writing: CompletionStream | None = None
        """The answer that is being written."""
        self._session: Session | None = None
        self._held: list[int] = []
        """The tokens that the session holds."""
        self._closed = False

    def begin(self, stream: CompletionStream) -> Generator[int, None, Ending]:
        """Generate an answer; the session may already hold the first part of its prompt.

        CetaneError once the model is closed."""
        if self._closed:
            raise CetaneError(f"{self.bundle.path}: the model is closed", "load it again")
        if self._writing is not None:
            self._writing._overtake()
        self._writing = stream
        settings, ids = stream.settings, list(stream.ids)
        vars(self._sampler).update(vars(settings))  # a draft model samples with the same object
        seeded = settings.seed is not None  # promises the same text; other calls round differently
        if self._speculator is not None:
            self._speculator.resting = seeded and not self._drafts_seeded
        held, self._held = self._held, []  # unknown until `end`, should this end early
        continued = 0 < len(held) < len(ids) and ids[: len(held)] == held
        if self._session is None or seeded or not continued:
            self._session = None  # frees its memory before the next session takes as much
            self._session, held = self._new_session(), []
        self._session.adapter = stream.adapter
        return generate(
            self._session, ids[len(held) :], self._sampler, stream.most,
            self.bundle.tokenizer.eos_ids, self._speculator,
        )  # fmt: skip

    def end(self, text: list[int]) -> None:
        """Remember a generation that ended by itself; `text` is its prompt and its answer."""
        assert self._session is not None
        self._writing, self._held = None, text[: self._session.position]

    def speculation(self) -> dict[str, Any] | None:
        """Counters of the drafter so far; None without one."""
        return None if self._speculator is None else self._speculator.summary()

    def close(self) -> None:
        """Save what the drafters have learned, and end an answer that nobody has read to its end.
        Nothing can be written afterwards."""
        self._closed = True
        if self._writing is not None:
            self._writing.close()
        if self._speculator is not None:
            self._speculator.close()

    def _new_session(self) -> Session:
        """A session for the drafters, if there are any, and for plain generation otherwise."""
        speculator = self._speculator
        return self.engine.session() if speculator is None else speculator.session(self.engine)
