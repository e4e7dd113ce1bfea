"""Calls of tools in the text of models, in the forms of their templates."""

import json

import pytest

from cetane.server.tools import may_be_call, parse_calls

NAMES = ["weather", "time"]
CALL = '{"name": "weather", "arguments": {"place": "Oslo"}}'
FORMS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes, cut at its end": f"<tool_call>\n{CALL}",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "mistral, marker skipped": f"[{CALL}]",
    "llama": '{"name": "weather", "parameters": {"place": "Oslo"}}',
    "llama, marked": '<|python_tag|>{"name": "weather", "parameters": {"place": "Oslo"}}',
    "generic": CALL,
    "fenced": f"```json\n{CALL}\n```",
    "arguments as text": '{"name": "weather", "arguments": "{\\"place\\": \\"Oslo\\"}"}',
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call(name: str) -> None:
    text, (call,) = parse_calls(FORMS[name], NAMES)
    assert text == "" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "Oslo"}
    assert all(may_be_call(FORMS[name][:length]) for length in range(len(FORMS[name])))


def test_several_calls_and_text_before() -> None:
    other = '{"name": "time", "arguments": {}}'
    text, calls = parse_calls(
        f"Let me see. <tool_call>{CALL}</tool_call><tool_call>{other}</tool_call>", NAMES
    )
    assert text == "Let me see." and [c.function.name for c in calls] == NAMES
    assert len({call.id for call in calls}) == 2
    assert parse_calls(f"Now: <tool_call>{CALL}</tool_call> and more", NAMES)[0] == "Now:  and more"
    _, calls = parse_calls(f"{CALL}; {other}", NAMES)
    assert [c.function.name for c in calls] == NAMES


@pytest.mark.parametrize(
    "text",
    ["Hello", '{"a": 1}', '{"name": "other", "arguments": {}}', "<tool_call>oops</tool_call>",
     '{"name": "weather", "arguments": [1]}', '{"name": "weather", "arguments": "x"}', "[" * 9000,
     f"{CALL} and more", f"<tool_call>{CALL}</tool_call><tool_call>oops</tool_call> and more",
     f"<tool_call>{CALL}</tool_call>" + '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "we'],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_calls(text, NAMES) == (text, [])


def test_plain_text_need_not_wait() -> None:
    assert not may_be_call("Hello <b") and may_be_call(" <tool_") and may_be_call("")
