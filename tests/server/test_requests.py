"""Requests as clients send them, also with the fields of their own types that have no value."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import ValidationError

from cetane.server.answers import CalledFunction, ChatChoice, MadeCall, Message, WholeAnswer
from cetane.server.bodies import parse
from cetane.server.errors import ApiError
from cetane.server.requests import ChatRequest, CompletionRequest, RequestBody

USER = {"role": "user", "content": "x"}


def parsed(**fields: Any) -> ChatRequest:
    content = {"model": "tiny", "messages": [USER]} | fields
    return parse(ChatRequest, json.dumps(content).encode())


def received() -> ChatCompletionMessage:
    """A message of the server, as OpenAI's client reads it."""
    call = MadeCall(id="1", function=CalledFunction(name="f", arguments="{}"))
    choice = ChatChoice(
        index=0, message=Message(content=None, tool_calls=[call]), logprobs=None,
        finish_reason="tool_calls",
    )  # fmt: skip
    answer = WholeAnswer(
        id="1", object="chat.completion", created=1, model="tiny", system_fingerprint="x",
        choices=[choice],
    )  # fmt: skip
    return ChatCompletion.model_validate_json(answer.model_dump_json()).choices[0].message


@pytest.mark.parametrize("whole", [True, False])
def test_a_client_sends_back_what_it_got(whole: bool) -> None:
    """The client leaves out fields that the server did not send; `model_dump` has all."""
    sent = received().model_dump(exclude_unset=not whole)
    assert sent["refusal"] is None and ("audio" in sent) == whole
    result = {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "f"}
    _, message, last = parsed(messages=[USER, sent, result]).messages
    assert message.role == "assistant" and message.tool_calls[0].function.name == "f"
    assert message.content is None
    assert last.name == "f"


def test_null_counts_as_left_out_at_every_level() -> None:
    tool = {"name": "f", "description": None, "parameters": None, "strict": None}
    request = parsed(
        stream=True, stream_options={"include_usage": None}, temperature=None,
        messages=[USER | {"name": None}, USER | {"role": "assistant", "tool_calls": None}],
        tools=[{"type": "function", "function": tool}],
    )  # fmt: skip
    assert request.stream_options is not None and not request.stream_options.include_usage
    assert request.tools[0].function.parameters == {"type": "object"}


MANY = 100_000
WRONG = {
    "unknown fields": ({f"k{i}": 1 for i in range(MANY)}, "k0", "unknown_parameter"),
    "unknown fields of a message": (
        {"messages": [USER | {f"k{i}": 1 for i in range(MANY)}]}, "messages.0.k0",
        "unknown_parameter",
    ),
    "unknown fields of tools": (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}}
                   | {f"k{i}": 1 for i in range(MANY // 100)} for n in range(100)]},
        "tools.0.k0", "unknown_parameter",
    ),
    "large biases": (
        {"logit_bias": {"x": 1} | {str(i): 1000 for i in range(MANY)}}, "logit_bias.0",
        "invalid_value",
    ),
    "biases that are no numbers": (
        {"logit_bias": {"x": 1} | {str(i): "x" for i in range(MANY)}}, "logit_bias.0",
        "invalid_value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_many_wrong_fields_are_one_error(name: str) -> None:
    """An error for each took a second for 100,000, in which the server answered nobody."""
    fields, param, code = WRONG[name]
    with pytest.raises(ApiError) as error:
        parsed(**fields)
    assert (error.value.param, error.value.code) == (param, code)
    assert isinstance(error.value.__cause__, ValidationError)
    assert error.value.__cause__.error_count() < 5


@pytest.mark.parametrize("bias", [-100, 100, 0.5, 0])
def test_right_biases_are_all_kept(bias: float) -> None:
    biases = {str(i): bias for i in range(1000)}
    assert parsed(logit_bias=biases).logit_bias == biases


@pytest.mark.parametrize("bias", [True, "1", [1], float("nan"), 100.1, -101, 10**39])
def test_a_bias_that_is_wrong(bias: Any) -> None:
    with pytest.raises(ApiError) as error:
        parsed(logit_bias={"1": 1, "2": bias})
    assert error.value.param == "logit_bias.2"


IGNORED = {
    "user": "me", "safety_identifier": "me", "metadata": {"run": "1"}, "store": True,
    "service_tier": "flex", "prompt_cache_key": "me", "prompt_cache_retention": "24h",
}  # fmt: skip


def test_fields_about_the_service_change_nothing() -> None:
    plain = parsed(stream=True, stream_options={"include_usage": True})
    options = {"include_usage": True, "include_obfuscation": False}
    with_all = parsed(stream=True, stream_options=options, **IGNORED)
    told = with_all.model_dump(exclude={*IGNORED, "stream_options"})
    assert told == plain.model_dump(exclude={*IGNORED, "stream_options"})
    parse(CompletionRequest, json.dumps({"model": "tiny", "prompt": "x"} | IGNORED).encode())


@pytest.mark.parametrize(("value", "why"), [(True, "valid integer"), (2, "equal to 1")])
def test_only_one_answer_is_chosen_from(value: Any, why: str) -> None:
    asked = {"model": "tiny", "prompt": "x"}
    assert parse(CompletionRequest, json.dumps(asked | {"best_of": 1}).encode())
    with pytest.raises(ApiError, match=f"^best_of: Input should be .*{why}"):
        parse(CompletionRequest, json.dumps(asked | {"best_of": value}).encode())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_called_so(value: float) -> None:
    with pytest.raises(ApiError, match=r"^temperature: Input should be a finite number"):
        parsed(temperature=value)


@pytest.mark.parametrize("field", ["best_of", "reasoning_effort", "suffix", "functions", "audio"])
def test_fields_that_would_change_the_answer_are_refused(field: str) -> None:
    with pytest.raises(ApiError, match="unknown key") as error:
        parsed(**{field: "x"})
    assert error.value.param == field


def test_two_tools_have_two_names() -> None:
    """A call names its tool: of two with one name, the grammar took the last one's schema."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "f")]
    assert parsed(tools=tools[:2])
    with pytest.raises(ApiError, match="tools: more than one has the name 'f'") as error:
        parsed(tools=tools)
    assert error.value.param == "tools"


def test_null_is_a_value_in_a_schema() -> None:
    schema = {"const": None, "properties": {"a": {"enum": [None, 1], "default": None}}}
    named = {"name": "x", "schema": schema, "strict": None}
    request = parsed(
        response_format={"type": "json_schema", "json_schema": named},
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
    )
    assert request.response_format is not None
    assert request.response_format.json_schema.schema_ == schema  # type: ignore[union-attr]
    assert request.tools[0].function.parameters == schema


IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"prompt": [1.5] * 20_000}),
        (CompletionRequest, {"prompt": [[1.5]] * 20_000}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 20_000}),
        (ChatRequest, {"messages": [{"role": "x"}] * 20_000}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 20_000}]}),
        (ChatRequest, {"messages": [USER | {"content": [IMAGE] * 20_000}]}),
    ],
)
def test_a_long_list_fails_at_its_first_wrong_item(
    kind: type[RequestBody], fields: dict[str, Any]
) -> None:
    """Four megabytes of wrong numbers held up all clients for 20 seconds."""
    with pytest.raises(ApiError) as error:
        parse(kind, json.dumps({"model": "tiny"} | fields).encode())
    cause = error.value.__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() < 10
