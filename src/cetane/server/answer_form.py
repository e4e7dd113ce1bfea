"""The form of an answer: what a worker writes becomes a whole answer, or chunks of a stream."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cetane.checkpoint.text_stream import TextStream
from cetane.engine.likelihood import TokenLikelihood
from cetane.server.answers import (
    CompletionDetails,
    FinishReason,
    MadeCall,
    PromptDetails,
    Usage,
    WholeAnswer,
)
from cetane.server.requests import ChatRequest, CompletionRequest
from cetane.server.served import Served
from cetane.server.writing import Ask, Echo, Ending, Event, Piece

Events = AsyncIterator[tuple[int, Event]]


@dataclass
class ChoiceSoFar:
    """One answer so far."""

    listed: TextStream
    """Decodes the tokens that have been listed, to tell where in the text each begins."""
    text: str = ""
    scores: list[TokenLikelihood] = field(default_factory=list)
    echoed: list[TokenLikelihood] = field(default_factory=list)
    ending: Ending | None = None
    sent: int = 0
    """Characters of the text that a stream has sent."""
    begun: bool = False
    """Whether a stream has sent a chunk of it."""
    offset: int = 0
    """Characters of the text that these tokens have written, the echo's too."""

    def add(self, event: Event) -> None:
        match event:
            case Echo():
                self.echoed += event.scores
            case Piece():
                self.text += event.text
                self.scores += event.scores
            case Ending():
                self.ending = event


class AnswerForm(ABC):
    """The form of the answers to one request."""

    kind: Literal["chat.completion", "text_completion"]
    chunk_kind: Literal["chat.completion.chunk", "text_completion"]
    prefix: str

    def __init__(
        self, request: ChatRequest | CompletionRequest, served: Served, asks: Sequence[Ask]
    ) -> None:
        self.request, self.served, self.asks = request, served, tuple(asks)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        stream = served.tokenizer.stream
        self.choices = [ChoiceSoFar(stream(() if ask.echo else ask.ids)) for ask in asks]

    async def whole(self, events: Events) -> bytes:
        """The whole answer, as JSON. Scores can make it long, so a thread of its own makes it."""
        async for number, event in events:
            self.choices[number].add(event)
        return await asyncio.to_thread(self.finished)

    def finished(self) -> bytes:
        """The JSON of the whole answer, when all choices have ended."""
        choices = [self.choice(number, choice) for number, choice in enumerate(self.choices)]
        return self.answer(self.kind, choices, self.usage()).model_dump_json().encode()

    async def stream(self, events: Events) -> AsyncIterator[str]:
        """The chunks of a stream, as lines of server-sent events."""
        async for number, event in events:
            self.choices[number].add(event)
            for choice in self.chunks(number, event):
                yield line(self.answer(self.chunk_kind, [choice]))
            await asyncio.sleep(0)  # many events may wait: other clients get their turn
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield line(self.answer(self.chunk_kind, [], self.usage()))
        yield "data: [DONE]\n\n"

    def answer(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"],
        choices: list[Any],
        usage: Usage | None = None,
    ) -> WholeAnswer:
        return WholeAnswer(
            id=self.id, object=kind, created=self.created, model=self.request.model,
            system_fingerprint=f"cetane-{self.served.bundle.digest[:12]}",
            choices=choices, usage=usage,
        )  # fmt: skip

    def usage(self) -> Usage:
        """The tokens of all choices. A prompt with several choices counts once."""
        endings = [choice.ending for choice in self.choices if choice.ending is not None]
        firsts = endings[:: self.request.n]
        prompt, tokens = sum(e.prompt for e in firsts), sum(e.tokens for e in endings)
        accepted = sum(e.accepted for e in endings)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            total_tokens=prompt + tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(e.cached for e in firsts)),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(e.drafted for e in endings) - accepted,
            ),
        )

    @abstractmethod
    def choice(self, number: int, choice: ChoiceSoFar) -> Any:
        """A choice of a whole answer."""

    @abstractmethod
    def chunks(self, number: int, event: Event) -> Iterator[Any]:
        """The choices of a stream's chunks for an event, which its choice already holds."""


def finish_reason(choice: ChoiceSoFar, calls: Sequence[MadeCall]) -> FinishReason:
    """Why a choice ended."""
    assert choice.ending is not None
    return "tool_calls" if calls else choice.ending.reason


def line(answer: WholeAnswer) -> str:
    """A chunk as a server-sent event."""
    return f"data: {answer.model_dump_json()}\n\n"
