"""Requests, as OpenAI's API and vLLM's tokenizer routes define them.

Unknown fields are refused, and so are values that the server would not honour.
"""

from collections import Counter
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class RequestBody(BaseModel):
    """The base of all requests, and of their parts. Types are strict: `"1"` is no number."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, content: Any) -> Any:
        """A field that is null counts as left out, also an unknown one: clients send back the
        answers that they got, with all fields of their own types.

        Of unknown fields only the first is kept: errors for a million would take many seconds.
        """
        if not isinstance(content, dict):
            return content
        given = {name: value for name, value in content.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == first}


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that fails at its first wrong item: errors for a million would take many seconds."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
MOST_BIAS = 100
"""The largest bias of a token, by OpenAI's API."""


def up_to_a_wrong_one(biases: Any) -> Any:
    """The first wrong bias alone, if there is one, as with `Items`."""
    if isinstance(biases, dict):
        for token, bias in biases.items():
            if type(bias) not in (int, float) or not -MOST_BIAS <= bias <= MOST_BIAS:
                return {token: bias}
    return biases


Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]],
    BeforeValidator(up_to_a_wrong_one),
]


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Any = None
    """Ignored: how OpenAI hides the lengths of chunks."""


class TextFormat(RequestBody):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestBody):
    """A schema with its name. Answers always follow it, whatever `strict` says."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class JsonSchemaFormat(RequestBody):
    """JSON that is valid against a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(RequestBody):
    """Text that matches a regular expression. An extension of OpenAI's API."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(RequestBody):
    """Text of a grammar in llguidance's Lark dialect. An extension of OpenAI's API."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat,
    Field(discriminator="type"),
]


class GenerationRequest(RequestBody):
    """What requests for chat and for completions have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps all tokens. With `min_p` an extension of OpenAI's API, as in llama.cpp and vLLM."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Items[Stop] = Field(default_factory=list, max_length=1000)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Biases = Field(default_factory=dict)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # About OpenAI's service. Many clients always send them, and they change no answer: ignored.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @model_validator(mode="after")
    def options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream = true")
        return self

    @property
    def constrained(self) -> bool:
        """Whether a grammar may have to be compiled."""
        return not isinstance(self.response_format, TextFormat | None)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TextPart(RequestBody):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Content = str | Items[TextPart]


class FunctionCall(RequestBody):
    """A call that the model made earlier."""

    name: str
    arguments: str


class ToolCall(RequestBody):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(RequestBody):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestBody):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(RequestBody):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] = Field(default_factory=list)


class ToolMessage(RequestBody):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None
    """The function's name, which older clients send."""


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class ToolFunction(RequestBody):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    strict: bool = False


class Tool(RequestBody):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Items[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only for logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: leave it out, since max_completion_tokens is given")
        if self.max_tokens == 0:
            raise ValueError("max_tokens: must be at least 1")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: only with tools")
        if self.forces_call and self.response_format is not None:
            raise ValueError("response_format: not together with a tool_choice that forces a call")
        names = [tool.function.name for tool in self.tools]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tools: more than one has the name {twice[0]!r}")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool {self.tool_choice.function.name!r}")
        return self

    @property
    def forces_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that `tool_choice` leaves: none, the one that it names, or all."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == wanted]
        return self.tools

    @property
    def constrained(self) -> bool:
        strict = any(tool.function.strict for tool in self.tools)
        return super().constrained or self.forces_call or strict


Ids = Items[Annotated[int, Field(ge=0)]]


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | Ids | Items[str] | Items[Ids]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int = Field(default=1, ge=1, le=1)

    @model_validator(mode="after")
    def consistent(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only for echo = true")
        return self


class TokenizeRequest(RequestBody):
    """`POST /tokenize`, as in vLLM."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`, as in vLLM."""

    model: str | None = None
    tokens: Ids
