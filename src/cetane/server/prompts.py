"""The prompts of requests, as tokens. A conversation is written by the model's own template."""

from collections.abc import Mapping, Sequence
from typing import Any

from cetane.errors import CetaneError
from cetane.server.errors import ApiError, unsupported
from cetane.server.requests import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    FunctionCall,
    ToolMessage,
)
from cetane.server.served import Served
from cetane.server.settings import Settings
from cetane.server.tools import described
from cetane.validation import parse_json


def check_prompt(ids: Sequence[int], served: Served, param: str) -> None:
    """Raise ApiError for a prompt that the model cannot take."""
    if not ids:
        raise ApiError(400, f"{param}: the prompt has no tokens", param, "invalid_value")
    if len(ids) > served.context:
        raise ApiError(
            400,
            f"{param}: the prompt has {len(ids)} tokens, the context holds {served.context}",
            param, "context_length_exceeded",
        )  # fmt: skip
    check_known(ids, served, param)


def check_known(ids: Sequence[int], served: Served, param: str) -> None:
    """Raise ApiError for a token that the model does not have."""
    try:
        served.tokenizer.check_known(ids, served.plan.vocab)
    except CetaneError as error:
        raise ApiError(400, f"{param}: {error.message}", param) from error


def chat_ids(request: ChatRequest, served: Served) -> list[int]:
    """The tokens of a conversation, by the model's own template."""
    tools = request.callable_tools
    template = served.tokenizer.template_for(tools)
    if template is None:
        raise unsupported(
            "messages", "this model has no chat template, so it is only for /v1/completions"
        )
    if tools and "tools" not in template:
        raise unsupported("tools", "the model's chat template knows no tools")
    messages = [for_template(message) for message in request.messages]
    try:
        text = served.tokenizer.render_chat(messages, tools=described(tools))
    except CetaneError as error:
        raise ApiError(400, f"messages: {error.message}", "messages", "invalid_value") from error
    return encoded(text, served, "messages", special=False)  # the template writes them itself


def encoded(text: str, served: Served, param: str, special: bool) -> list[int]:
    """The tokens of a prompt, with special tokens around them or without. Raises ApiError for a
    text that is too long whatever its tokens are, since encoding it would take seconds."""
    size, most = len(text.encode(errors="replace")), served.context * served.tokenizer.longest
    if size > most:
        raise ApiError(
            400, f"{param}: the prompt has {size} bytes, the context holds at most {most}",
            param, "context_length_exceeded",
        )  # fmt: skip
    try:
        return served.tokenizer.encode_aside(text, add_special_tokens=special)
    except CetaneError as error:
        raise ApiError(400, f"{param}: {error.message}", param, "invalid_value") from error


def for_template(message: ChatMessage) -> Mapping[str, Any]:
    """A message as chat templates read it: content as text, arguments of calls as objects.

    Templates ask whether there is content, and a call may have none.
    """
    role = "system" if message.role == "developer" else message.role
    content: dict[str, Any] = {"role": role}
    if message.content is not None:
        content["content"] = text_of(message.content)
    if message.name is not None:
        content["name"] = message.name
    if isinstance(message, ToolMessage):
        content["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        content["tool_calls"] = [
            {"id": call.id, "type": "function", "function": called(call.function)}
            for call in message.tool_calls
        ]  # fmt: skip
    return content


def called(function: FunctionCall) -> dict[str, Any]:
    """An earlier call. Clients send its arguments as a text of JSON. An empty text, as some clients
    send for a function without parameters, has none."""
    text, param = function.arguments.strip() or "{}", "messages"
    try:
        arguments = parse_json(text, f"{param}: the arguments field of a tool call")
    except CetaneError as error:
        raise ApiError(400, error.message, param, "invalid_value") from error
    return {"name": function.name, "arguments": arguments}


def text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def completion_prompts(
    request: CompletionRequest, served: Served, settings: Settings
) -> list[list[int]]:
    """The prompts of a request for completions, as tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [encoded(prompt, served, "prompt", special=True)]
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    if len(prompt) > settings.prompts:
        raise ApiError(400, f"prompt: more than {settings.prompts} prompts", "prompt")
    return [
        encoded(part, served, "prompt", special=True) if isinstance(part, str) else list(part)
        for part in prompt
        if not isinstance(part, int)
    ]
