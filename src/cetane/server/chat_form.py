"""The form of answers in a conversation: `/v1/chat/completions`."""

from collections.abc import Iterator, Sequence
from typing import Literal

from cetane.engine.likelihood import TokenLikelihood
from cetane.server.answer_form import AnswerForm, ChoiceSoFar, finish_reason
from cetane.server.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    MadeCall,
    MadeCallDelta,
    Message,
    TokenLogprob,
    TopLogprob,
)
from cetane.server.requests import ChatRequest
from cetane.server.tools import OPEN, may_be_call, parse_calls
from cetane.server.writing import Echo, Event, Piece, overlap


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
            finish_reason=finish_reason(choice, calls),
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
        end.finish_reason = finish_reason(choice, calls)
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
