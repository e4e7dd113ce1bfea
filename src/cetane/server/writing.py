"""Writing: one answer, from its prompt's tokens to pieces of text with their scores."""

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from cetane.engine.backend import Array
from cetane.engine.generate import extend
from cetane.engine.likelihood import TokenLikelihood, likelihoods, token_likelihood
from cetane.engine.prefixes import Fed
from cetane.engine.sampling import Sampler
from cetane.pipeline.completion import Sampling
from cetane.server.answers import FinishReason
from cetane.server.grammar import GrammarConstraint
from cetane.server.metrics import Metrics
from cetane.server.served import Served
from cetane.speculate.drafter import watches
from cetane.speculate.speculator import Counters, Speculator

ECHOED = 64
"""The most scores of one echo: a stream makes a chunk of it, and nothing else meanwhile."""


class OutOfTime(Exception):
    """The time of a request is over."""


@dataclass(frozen=True)
class Ask:
    """One answer that is asked for."""

    ids: tuple[int, ...]
    """The tokens of the prompt."""
    most: int
    """The most tokens of the answer."""
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    top: int | None = None
    """The number of likeliest tokens in each token's score; None for no scores."""
    echo: bool = False
    """Whether the prompt's own tokens are scored too."""
    grammar: GrammarConstraint | None = None
    adapter: str | None = None
    """The adapter of the whole sequence; None for the base alone."""
    stop_tokens: tuple[int, ...] = ()
    """Special tokens among `stops`: they are no part of the text, so they are found as tokens."""
    continues: bool = False
    """Whether the answer continues the prompt's text; the answer to a conversation is a text of its
    own."""


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: whole characters, and the scores of its tokens."""

    text: str
    scores: tuple[TokenLikelihood, ...] = ()


@dataclass(frozen=True)
class Echo:
    """The scores of some of a prompt's tokens, in their order. The first token has none."""

    scores: tuple[TokenLikelihood, ...]


@dataclass(frozen=True)
class Ending:
    """The end of an answer, with its counts of tokens."""

    reason: FinishReason
    prompt: int
    cached: int
    tokens: int
    drafted: int = 0
    accepted: int = 0
    last: TokenLikelihood | None = None
    """The score of the stop token, if one ended the answer."""


Event = Echo | Piece | Ending


class HeldText:
    """Text that waits until it is sure that no stop text begins in it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.text = stops, ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is sure by now. After a stop text nothing more comes."""
        self.text += piece
        places = [place for stop in self.stops if (place := self.text.find(stop)) >= 0]
        if places:
            self.stopped = True
            sure, self.text = self.text[: min(places)], ""
            return sure
        waiting = max((overlap(self.text, stop) for stop in self.stops), default=0)
        cut = len(self.text) - waiting
        sure, self.text = self.text[:cut], self.text[cut:]
        return sure


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text with which a stop text begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


class AnswerWriter:
    """Writes one answer on the worker's thread."""

    def __init__(
        self,
        served: Served,
        ask: Ask,
        metrics: Metrics,
        check: Callable[[], None],
        asked: float | None,
    ) -> None:
        """`check` is called before every call of the model. `asked`: the time of the request, in
        `time.perf_counter` seconds; None for its answers after the first."""
        self.served, self.ask, self.metrics = served, ask, metrics
        self.check, self.asked = check, asked
        self.stop = (*served.tokenizer.eos_ids, *ask.stop_tokens)
        """The tokens that end the answer."""
        self.noted: deque[TokenLikelihood] = deque()
        """Scores of tokens that a step gave, and that `take` has not read yet."""
        self.scores: list[TokenLikelihood] = []
        """Scores of tokens whose text waits."""
        self.count = 0
        """The tokens of the answer so far."""
        self.last: tuple[int, float] | None = None
        """The position of the session at the last step, and the time of that step in seconds."""

    def write(self, emit: Callable[[Event], None]) -> Ending:
        """Write the answer; `emit` gets every piece. Returns its end, which is not emitted.

        Raises OutOfTime if the time is over before the end: an answer that the clock cuts is none.
        """
        served, ask = self.served, self.ask
        constraint = None if ask.grammar is None else ask.grammar.fresh()
        sampler = Sampler(**ask.sampling, constraint=constraint)
        drafts = served.speculator(sampler)
        watch = [] if drafts is None else watches(served.plan, drafts.drafters)
        if ask.echo and ask.top is not None:
            scores, fed = likelihoods(
                served.prefixes, ask.ids, 1, ask.top, self.check, ask.adapter, watch
            )
            for start in range(0, len(scores), ECHOED):
                emit(Echo(tuple(scores[start : start + ECHOED])))
        else:
            fed = served.prefixes.feed(ask.ids, check=self.check, adapter=ask.adapter, watch=watch)
        self.session = fed.session
        if drafts is not None:
            drafts.begin(fed.session, ask.ids, self.stop)
        reason, last = self.take(self.generation(fed, sampler, drafts), emit)
        counts = Counters() if drafts is None else drafts.counters
        accepted = self.accepted(counts)
        return Ending(reason, len(ask.ids), fed.cached, self.count, counts.drafted, accepted, last)

    def accepted(self, counts: Counters) -> int:
        """The accepted tokens in the answer. A stop text may end it within a step: the last of the
        tokens that it leaves out is the model's own."""
        # `counts.tokens` lacks the answer's first token. So the difference is one less than the
        # tokens left out, and does not count the model's own.
        return counts.accepted - max(0, counts.tokens - self.count)

    def generation(
        self, fed: Fed, sampler: Sampler, drafts: Speculator | None
    ) -> Generator[int, None, str]:
        """The tokens of the answer."""
        if not self.ask.most:
            return "length"
        return (
            yield from extend(
                fed.session, fed.logits, sampler, self.ask.most, self.stop, drafts, self.note
            )
        )

    def take(
        self, tokens: Generator[int, None, str], emit: Callable[[Event], None]
    ) -> tuple[FinishReason, TokenLikelihood | None]:
        """Emit the text of tokens up to the end. Returns its reason, and a stop token's score."""
        text = self.served.tokenizer.stream(self.ask.ids if self.ask.continues else ())
        held = HeldText(self.ask.stops)
        stop_token = False
        while True:
            try:
                token = next(tokens)
            except StopIteration as end:
                stop_token = end.value == "stop"
                break
            self.count += 1
            if self.noted:
                self.scores.append(self.noted.popleft())
            self.pass_on(held.push(text.push(token)), emit)
            if held.stopped:
                break
            self.check()
        tokens.close()
        last = self.noted.popleft() if stop_token and self.noted else None
        if not held.stopped:
            rest = held.push(text.finish().rstrip("\N{REPLACEMENT CHARACTER}"))  # half a character
            self.pass_on(rest if held.stopped else rest + held.text, emit)
        if self.scores:
            emit(Piece("", tuple(self.scores)))
        return "stop" if stop_token or held.stopped else "length", last

    def pass_on(self, text: str, emit: Callable[[Event], None]) -> None:
        """Emit text with the scores that wait for it."""
        if text:
            emit(Piece(text, tuple(self.scores)))
            self.scores = []

    def note(self, token: int, logits: Array) -> None:
        """Called with every new token: measure the step, and score the token."""
        now, position = time.perf_counter(), self.session.position
        name = self.served.name
        if self.last is None:
            if self.asked is not None:
                self.metrics.first.labels(name).observe(now - self.asked)
        elif position != self.last[0]:  # else it came with the one before, by a draft
            self.metrics.step.labels(name).observe(now - self.last[1])
        self.last = position, now
        if self.ask.top is not None:
            self.noted.append(token_likelihood(logits, token, self.ask.top))
