"""The forms of answers: what a worker writes becomes a whole answer, or chunks of a stream."""

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
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    Delta,
    FinishReason,
    MadeCall,
    MadeCallDelta,
    Message,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
    WholeAnswer,
)
from cetane.server.requests import ChatRequest, CompletionRequest
from cetane.server.served import Served
from cetane.server.tools import OPEN, may_be_call, parse_calls
from cetane.server.writing import Ask, Echo, Ending, Event, Piece, overlap

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


class ChatForm(AnswerForm):
    """Answers of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    request: ChatRequest

    @property
    def names(self) -> list[str]:
        """The names of the tools that the model may call."""
        tools = [] if self.request.tool_choice == "none" else self.request.tools
        return [tool.function.name for tool in tools]

    def choice(self, number: int, choice: ChoiceSoFar) -> ChatChoice:
        text, calls = self.parsed(choice.text)
        return ChatChoice(
            index=number,
            message=Message(content=text if text or not calls else None, tool_calls=calls or None),
            logprobs=self.logprobs(choice.scores),
            finish_reason=reason(choice, calls),
        )

    def chunks(self, number: int, event: Event) -> Iterator[ChatChunkChoice]:
        choice = self.choices[number]
        if isinstance(event, Echo):
            return
        if isinstance(event, Piece):
            text = self.sure(choice)
            if text or event.scores:
                yield self.chunk(number, self.delta(choice, text), event.scores)
            return
        text, calls = self.parsed(choice.text)
        rest = text[choice.sent :]
        if rest or not choice.begun:
            yield self.chunk(number, self.delta(choice, rest))
        if calls:
            made = [MadeCallDelta(index=i, **dict(call)) for i, call in enumerate(calls)]
            yield self.chunk(number, Delta(tool_calls=made))
        end = self.chunk(number, Delta())
        end.finish_reason = reason(choice, calls)
        yield end

    def sure(self, choice: ChoiceSoFar) -> str:
        """The text that can be sent now. Text that may become a call of a tool waits."""
        if not self.names:
            return choice.text[choice.sent :]
        if may_be_call(choice.text):
            return ""
        text = choice.text[: len(choice.text) - overlap(choice.text, OPEN)]
        return text.rstrip()[choice.sent :]  # a call that follows takes the blanks before it

    def delta(self, choice: ChoiceSoFar, text: str) -> Delta:
        """The next text of a choice; its first one names the role."""
        role: Literal["assistant"] | None = None if choice.begun else "assistant"
        choice.sent += len(text)
        choice.begun = True
        return Delta(role=role, content=text)

    def chunk(
        self, number: int, delta: Delta, scores: Sequence[TokenLikelihood] = ()
    ) -> ChatChunkChoice:
        logprobs = self.logprobs(scores) if scores else None
        return ChatChunkChoice(index=number, delta=delta, logprobs=logprobs)

    def parsed(self, text: str) -> tuple[str, list[MadeCall]]:
        """The text of an answer, and the calls of tools in it."""
        if not self.names:
            return text, []
        content, calls = parse_calls(text, self.names)
        return content, calls if self.request.parallel_tool_calls else calls[:1]

    def logprobs(self, scores: Sequence[TokenLikelihood]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **dict(self.top(score.token, score.logprob)),
                    top_logprobs=[self.top(token, logprob) for token, logprob in score.top],
                )
                for score in scores
            ]
        )

    def top(self, token: int, logprob: float) -> TopLogprob:
        raw = self.served.tokenizer.token_bytes(token)
        return TopLogprob(token=self.served.token_text(token), logprob=logprob, bytes=list(raw))


class CompletionForm(AnswerForm):
    """Answers of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    request: CompletionRequest

    def choice(self, number: int, choice: ChoiceSoFar) -> CompletionChoice:
        last = choice.ending.last if choice.ending is not None else None
        scores = [*choice.scores, *([] if last is None else [last])]
        return CompletionChoice(
            index=number,
            text=self.echoed(number) + choice.text,
            logprobs=self.logprobs(number, [*choice.echoed, *scores], first=True),
            finish_reason=reason(choice, ()),
        )

    def chunks(self, number: int, event: Event) -> Iterator[CompletionChoice]:
        choice, first = self.choices[number], not self.choices[number].begun
        scores: Sequence[TokenLikelihood] = ()
        text = self.echoed(number) if first else ""
        match event:
            case Echo():
                scores = event.scores
            case Piece():
                text, scores = text + event.text, event.scores
            case Ending():
                scores = () if event.last is None else (event.last,)
        ended = isinstance(event, Ending)
        if not (text or scores or ended):
            return
        choice.begun = True
        yield CompletionChoice(
            index=number,
            text=text,
            logprobs=self.logprobs(number, scores, first),
            finish_reason=reason(choice, ()) if ended else None,
        )

    def echoed(self, number: int) -> str:
        """The text of a choice's prompt, if it is wanted back."""
        if not self.request.echo:
            return ""
        text = self.given(number)
        return self.served.tokenizer.decode(self.asks[number].ids) if text is None else text

    def given(self, number: int) -> str | None:
        """A choice's prompt, if the request has it as text."""
        prompt = self.request.prompt
        prompts = [prompt] if isinstance(prompt, str) else prompt
        text = prompts[number // self.request.n]
        return text if isinstance(text, str) else None

    def logprobs(
        self, number: int, scores: Sequence[TokenLikelihood], first: bool
    ) -> CompletionLogprobs | None:
        """Scores as four lists. The `first` chunk of an echo has the prompt's first token too."""
        if self.request.logprobs is None:
            return None
        tokens = [score.token for score in scores]
        logprobs: list[float | None] = [score.logprob for score in scores]
        tops: list[dict[str, float] | None] = [self.tops(score) for score in scores]
        if first and self.request.echo:
            tokens = [self.asks[number].ids[0], *tokens]
            logprobs, tops = [None, *logprobs], [None, *tops]
        offsets, choice = [], self.choices[number]
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += self.written(number, token)
        texts = [self.served.token_text(token) for token in tokens]
        return CompletionLogprobs(
            tokens=texts, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets
        )

    def written(self, number: int, token: int) -> int:
        """The characters that the next listed token writes. A special one writes none, unless the
        prompt has its text there, which an echo gives back."""
        choice, tokenizer = self.choices[number], self.served.tokenizer
        text = choice.listed.push(token)
        if not text and self.request.echo:
            special = tokenizer.decode([token], skip_special_tokens=False)
            prompt = self.given(number) or ""
            if special != tokenizer.decode([token]) and prompt.startswith(special, choice.offset):
                text = special
        return len(text)

    def tops(self, score: TokenLikelihood) -> dict[str, float]:
        """The likeliest tokens, and the token itself, by their texts."""
        tops: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            tops.setdefault(self.served.token_text(token), logprob)  # of equal texts the likelier
        return tops


def reason(choice: ChoiceSoFar, calls: Sequence[MadeCall]) -> FinishReason:
    """Why a choice ended."""
    assert choice.ending is not None
    return "tool_calls" if calls else choice.ending.reason


def line(answer: WholeAnswer) -> str:
    """A chunk as a server-sent event."""
    return f"data: {answer.model_dump_json()}\n\n"
