"""Bodies of requests: how an error names what is wrong in one."""

import json
from typing import Any

import pytest
from tests.server.test_requests import IMAGE, USER, parsed

from cetane.server.bodies import parse
from cetane.server.errors import ApiError
from cetane.server.requests import ChatRequest, CompletionRequest, RequestBody


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"messages": [USER | {"nom": "x"}]}, "role, content, name"),
        ({"response_format": {"type": "text", "text": "x"}}, "type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}},
                              "strict": True}}, "type, json_schema"),
    ],
)  # fmt: skip
def test_an_unknown_key_lists_the_keys_of_its_own_kind(fields: dict[str, Any], known: str) -> None:
    with pytest.raises(ApiError) as error:
        parsed(**fields)
    assert error.value.message.endswith(f"known: {known}")


PARTS = [{"type": "text", "text": "x"}, IMAGE]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
MISPLACED: dict[str, tuple[type[RequestBody], dict[str, Any]]] = {
    "messages.0.content.1.type: Input should be 'text'": (
        ChatRequest, {"messages": [USER | {"content": PARTS}]}
    ),
    "messages.0.content: Input should be a valid string": (
        ChatRequest, {"messages": [USER | {"content": 5}]}
    ),
    "messages.1.tool_calls.0.id: Field required": (ChatRequest, {"messages": [USER, CALL]}),
    "tool_choice.type: Input should be 'function'": (
        ChatRequest, {"messages": [USER], "tool_choice": {"type": "allowed_tools"}}
    ),
    "response_format.json_schema.schema: Field required": (
        ChatRequest,
        {"messages": [USER],
         "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ),
    "stop: String should have at least 1 character": (
        CompletionRequest, {"prompt": "x", "stop": ""}
    ),
    "prompt.0: Input should be a valid integer": (CompletionRequest, {"prompt": [1.5]}),
    "prompt: Field required": (CompletionRequest, {"prompt": None}),
}  # fmt: skip


@pytest.mark.parametrize("told", MISPLACED)
def test_an_error_names_the_place_as_the_client_wrote_it(told: str) -> None:
    kind, fields = MISPLACED[told]
    with pytest.raises(ApiError) as error:
        parse(kind, json.dumps({"model": "tiny"} | fields).encode())
    assert error.value.message == told
    assert error.value.param == told.split(":")[0]


def test_an_error_is_short_however_long_a_key_is() -> None:
    with pytest.raises(ApiError) as error:
        parsed(**{"k" * 10_000: 1})
    assert error.value.code == "unknown_parameter"
    assert len(json.dumps(error.value.as_json())) < 1000


def test_an_error_without_a_place_names_no_field() -> None:
    with pytest.raises(ApiError, match="half a character") as error:
        parse(ChatRequest, b'{"model": "tiny", "\\ud800": 1}')
    assert error.value.param is None
