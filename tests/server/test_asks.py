"""From requests to asks: what a model cannot honour, and what the asks of a request share."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cetane.checkpoint import Tokenizer
from cetane.server.asks import chat_grammar, check_choices, completion_asks
from cetane.server.errors import ApiError
from cetane.server.prompts import chat_ids
from cetane.server.requests import ChatRequest, CompletionRequest
from cetane.server.settings import Settings

CALL = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}
ASKED: dict[str, dict[str, Any]] = {
    "tool_choice": CALL,
    "response_format": {"response_format": {"type": "json_object"}},
    "logit_bias": {"logit_bias": {"1": 1.0}},
    "temperature": {"temperature": 1.0},
}


@pytest.mark.parametrize("field", ASKED)
def test_a_head_that_chooses_refuses_by_field(field: str) -> None:
    served: Any = type("Served", (), {"chooses": True})
    plain = {"model": "it", "messages": [{"role": "user", "content": "x"}], "temperature": 0.0}
    request = ChatRequest.model_validate(plain | ASKED[field])
    with pytest.raises(ApiError) as error:
        check_choices(request, served, None, "a grammar")
    assert error.value.param == field


class Model:
    """What asks need of a served model; its tokenizer counts the texts that it encodes."""

    chooses, context, longest = False, 8, 4
    plan = SimpleNamespace(vocab=1000)
    adapters: ClassVar = {"it": None}

    def __init__(self) -> None:
        self.tokenizer, self.encoded = self, 0

    def encode_aside(self, _: str, add_special_tokens: bool) -> list[int]:
        self.encoded += 1
        return [1]

    def special_ids(self, _: Sequence[str]) -> tuple[int, ...]:
        return ()

    def check_known(self, ids: list[int], vocab: int) -> None:
        assert max(ids) < vocab


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "it"} | fields)


def test_answers_share_what_is_large() -> None:
    """A bias may name every token, and a request have thousands of answers."""
    served: Any = Model()
    asked = request(prompt=["a", "b"], n=3, logit_bias={str(token): 1.0 for token in range(1000)})
    asks = completion_asks(asked, served, Settings())
    assert len(asks) == 6
    assert len({id(ask.sampling["logit_bias"]) for ask in asks}) == 1
    assert len({id(ask.ids) for ask in asks}) == 2


def test_too_many_prompts_are_refused_before_they_are_encoded() -> None:
    served: Any = Model()
    with pytest.raises(ApiError, match="more than 2 prompts"):
        completion_asks(request(prompt=["a"] * 3), served, Settings(prompts=2))
    assert not served.encoded


def test_a_prompt_that_no_tokens_can_hold_is_refused_before_it_is_encoded() -> None:
    """Encoding one of 4 MB takes 12 s. Of 32 bytes, 8 tokens of 4 bytes may hold all."""
    served: Any = Model()
    for prompt in ("é" * 16 + "a", ["a" * 33]):
        with pytest.raises(ApiError, match="the context holds at most 32") as error:
            completion_asks(request(prompt=prompt), served, Settings())
        assert error.value.status == 400
        assert error.value.code == "context_length_exceeded"
    assert not served.encoded
    assert completion_asks(request(prompt="é" * 16), served, Settings())


@pytest.mark.parametrize(("limit", "most"), [(None, 16), (5, 5), (100, 16)])
def test_a_limit_shortens_a_default(limit: int | None, most: int) -> None:
    """OpenAI's API writes 16 tokens of a completion whose request says none."""
    served: Any = Model()
    served.context = 64
    settings = Settings(max_tokens=limit)
    for left_out in ({}, {"max_tokens": None}):
        (ask,) = completion_asks(request(prompt="a", **left_out), served, settings)
        assert ask.most == most


def test_a_limit_refuses_what_a_request_asks_for() -> None:
    served: Any = Model()
    with pytest.raises(ApiError, match="max_tokens: at most 5 here"):
        completion_asks(request(prompt="a", max_tokens=6), served, Settings(max_tokens=5))


TOOL_USE = "{{ tools | tojson }} <tool_call>{{ messages[0].content }}"
NOW = {"type": "function", "function": {"name": "now", "strict": True}}


def test_a_request_with_tools_takes_the_template_for_tools(tiny_checkpoint_folder: Path) -> None:
    """The default one of Hermes 3 and Mixtral knows no tools."""
    tokenizer = replace(
        Tokenizer.load(tiny_checkpoint_folder),
        chat_template="{{ messages[0].content }}", tool_template=TOOL_USE,
    )  # fmt: skip
    served: Any = SimpleNamespace(tokenizer=tokenizer, constrains=True, context=1000)

    def asked(**fields: Any) -> ChatRequest:
        messages = [{"role": "user", "content": "x"}]
        return ChatRequest.model_validate({"model": "it", "messages": messages} | fields)

    def prompt(**fields: Any) -> str:
        return tokenizer.decode(chat_ids(asked(**fields), served))

    assert prompt() == prompt(tools=[NOW], tool_choice="none") == "x"
    for choice in ("auto", "required", {"type": "function", "function": {"name": "now"}}):
        assert prompt(tools=[NOW], tool_choice=choice).endswith(" <tool_call>x")
        grammar = chat_grammar(asked(tools=[NOW], tool_choice=choice), served)
        assert grammar is not None and "<tool_call>" in grammar
    assert chat_grammar(asked(tools=[NOW], tool_choice="none"), served) is None
