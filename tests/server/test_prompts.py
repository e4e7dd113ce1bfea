"""Prompts of requests: what becomes of an earlier call."""

import pytest

from cetane.server.errors import ApiError
from cetane.server.prompts import for_template
from cetane.server.requests import AssistantMessage


def spoken(arguments: str) -> AssistantMessage:
    """A message of a model that called a function."""
    call = {"id": "1", "function": {"name": "now", "arguments": arguments}}
    return AssistantMessage.model_validate({"role": "assistant", "tool_calls": [call]})


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_an_earlier_call_without_arguments(arguments: str) -> None:
    (call,) = for_template(spoken(arguments))["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize("content", [None, ""])
def test_an_earlier_call_with_content_or_without(content: str | None) -> None:
    """Templates ask whether content is defined, and transformers leaves out what is null."""
    message = spoken("{}").model_copy(update={"content": content})
    assert for_template(message).get("content") == content
    assert ("content" in for_template(message)) == (content is not None)


def test_an_earlier_call_that_is_no_json() -> None:
    with pytest.raises(ApiError, match="the arguments field of a tool call is not valid JSON"):
        for_template(spoken("{"))
