"""Answers, as OpenAI's API defines them. Log probabilities are in nats."""

from typing import Any, Literal

from pydantic import BaseModel, Field

Absent = Field(default=None, exclude_if=lambda value: value is None)
"""A field that is left out where it has no value."""

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    """Tokens of drafts, which OpenAI's API calls predictions."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class MadeCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MadeCallDelta(MadeCall):
    index: int


class Message(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MadeCall] | None = Absent


class Delta(BaseModel):
    role: Literal["assistant"] | None = Absent
    content: str | None = Absent
    tool_calls: list[MadeCallDelta] | None = Absent


class ChatChoice(BaseModel):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionLogprobs(BaseModel):
    """Lists with an entry for each token. The scores of a prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class WholeAnswer(BaseModel):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | None = Absent
