"""The unmodified `openai` package against a server: every answer is valid against its types."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.conftest import build_model

from cetane.checkpoint import Tokenizer
from cetane.server.app import serve
from cetane.server.writing import ECHOED

MESSAGES = [{"role": "user", "content": "the cetane number"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


def chat(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    """A whole answer, checked strictly against the package's type."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 1} | options
    answer = client.chat.completions.create(**options)
    return ChatCompletion.model_validate(answer.model_dump())


def stream(client: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    """The chunks of a streamed answer, each checked."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 1} | options
    chunks = client.chat.completions.create(stream=True, **options)
    return [ChatCompletionChunk.model_validate(chunk.model_dump()) for chunk in chunks]


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """The tiny model, with its weights rounded as in the bundle."""
    return build_model("llama").half().float()


@pytest.fixture(scope="module")
def prompt(bundle: Any) -> list[int]:
    return bundle.tokenizer.chat(MESSAGES)


@pytest.fixture(scope="module")
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Transformers' own greedy search."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def test_greedy_is_that_of_transformers(client: Any, bundle: Any, greedy: list[int]) -> None:
    answer = chat(client, temperature=0)
    text = bundle.tokenizer.decode(greedy).rstrip("\N{REPLACEMENT CHARACTER}")
    assert text and answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.model == "tiny"


def test_logprobs_are_those_of_transformers(
    client: Any, model: Any, prompt: list[int], greedy: list[int]
) -> None:
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=3)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + greedy])).logits[0, len(prompt) - 1 : -1]
    truth = torch.log_softmax(logits.double(), -1)
    content = answer.choices[0].logprobs.content
    wanted = [truth[i, token].item() for i, token in enumerate(greedy)]
    np.testing.assert_allclose([token.logprob for token in content], wanted, atol=0.01)
    for row, token in zip(truth, content, strict=True):
        tops = [top.logprob for top in token.top_logprobs]
        np.testing.assert_allclose(tops, row.topk(3).values.tolist(), atol=0.01)
    raw = b"".join(bytes(token.bytes) for token in content)
    assert raw.decode(errors="replace").startswith(answer.choices[0].message.content[:4])
    assert chat(client).choices[0].logprobs is None


def test_a_stream_is_the_whole_answer(client: Any) -> None:
    whole = chat(client, logprobs=True, n=2)
    chunks = stream(client, logprobs=True, n=2, stream_options={"include_usage": True})
    counted = chunks[-1].usage
    assert counted.prompt_tokens == whole.usage.prompt_tokens
    assert counted.completion_tokens == whole.usage.completion_tokens == 2 * 8
    assert chunks[-1].choices == []
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[0].delta.role == "assistant"
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        scores = [s for part in parts if part.logprobs for s in part.logprobs.content]
        assert scores == choice.logprobs.content
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_seeds_and_sampling(client: Any) -> None:
    def text(**options: Any) -> str | None:
        return chat(client, **options).choices[0].message.content

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text(seed=-1) == text(seed=-1) != text(seed=1)  # as OpenAI's: any signed 64-bit integer
    assert text(seed=-(2**63)) != text(seed=2**63 - 1)
    one, two = chat(client, seed=-1, n=2).choices
    assert one.message.content == text(seed=-1) != two.message.content
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(openai.BadRequestError, match="seed"):
            text(seed=seed)
    assert text(seed=3, top_p=0.0) == text(temperature=0) == text(extra_body={"top_k": 1})
    assert text(extra_body={"min_p": 1.0}) == text(temperature=0)
    long = {"temperature": 0, "max_tokens": 200}
    assert text(**long) != text(**long, presence_penalty=2, frequency_penalty=2)
    banned = {str(token): -100 for token in range(1, 288)}
    only = chat(client, logit_bias=banned | {"70": 100}, temperature=0, max_tokens=3)
    assert len(set(only.choices[0].message.content or "")) == 1


def test_stop(client: Any) -> None:
    whole = chat(client, max_tokens=30).choices[0].message.content
    stop = whole[5:7]
    answer = chat(client, max_tokens=30, stop=["never this", stop]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    chunks = stream(client, max_tokens=30, stop=stop)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.message.content


def test_a_special_token_as_a_stop(bundle: Any, serving: Any) -> None:
    """Its text never comes, since special tokens are no part of an answer."""
    app = serve(bundle.path)
    backend = app.state.service.worker(None).served.tokenizer.backend
    text = backend.id_to_token(70)
    backend.add_special_tokens([text])
    with serving(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        always = {"logit_bias": {"70": 100}, "temperature": 0}
        answer = completion(client, **always)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 4)
        answer = completion(client, **always, stop=["never this", text])
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 0)
        assert answer.choices[0].text == ""


def test_a_prompt_is_not_computed_twice(client: Any, prompt: list[int]) -> None:
    messages = [{"role": "user", "content": "a long prompt " * 12}]
    first, second = (chat(client, messages=messages, seed=9) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens
    assert first.choices == second.choices
    longer = chat(client, messages=[*messages, {"role": "assistant", "content": "yes"}, *MESSAGES])
    assert longer.usage.prompt_tokens_details.cached_tokens >= 96


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call(client: Any, choice: Any) -> None:
    asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
    answer = chat(client, **asked).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["place"] in ("Oslo", "Rome") and arguments["days"] in (1, 2)
    assert answer.finish_reason == "tool_calls"
    chunks = stream(client, **asked)
    made = [d for c in chunks for choice in c.choices for d in choice.delta.tool_calls or []]
    assert [(m.index, m.function.arguments) for m in made] == [(0, call.function.arguments)]
    assert not "".join(c.choices[0].delta.content or "" for c in chunks)


def test_a_conversation_with_a_call(client: Any) -> None:
    call = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    for spoken in (call, call.model_dump()):  # as the package got it
        answer = chat(client, messages=[*MESSAGES, spoken, result], tools=[WEATHER])
        assert answer.choices[0].message.content


MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings") }}
            {%- endif %}
            {{- "[TOOL_CALLS]" + call.function | tojson + call.id }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings") }}
        {%- endif %}
        {{- "[TOOL_RESULTS]" + message.content + message.tool_call_id }}
    {%- else %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- endif %}
{%- endfor %}"""
"""The checks and the marks of the templates in mistralai's repositories."""


def test_a_template_that_takes_ids_of_nine_characters(
    client: Any, application: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = application.state.service.workers
    mistral = replace(worker.served.tokenizer, chat_template=MISTRAL)
    monkeypatch.setattr(worker.served, "tokenizer", mistral)
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    messages: list[Any] = list(MESSAGES)
    for _ in range(2):
        spoken = chat(client, messages=messages, **asked).choices[0].message
        (call,) = spoken.tool_calls
        assert call.id.isalnum()
        messages += [spoken, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]


def test_json_object_and_text(client: Any) -> None:
    answer = chat(client, response_format={"type": "text"})
    assert answer.choices[0].message.content
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, response_format=asked, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)
    asked = {"type": "regex", "regex": "[ab]{3}"}
    answer = chat(client, extra_body={"response_format": asked}, max_tokens=60)
    assert set(answer.choices[0].message.content) <= {"a", "b"}
    assert len(answer.choices[0].message.content) == 3


def completion(client: Any, **options: Any) -> Completion:
    options = {"model": "tiny", "prompt": "the rating", "max_tokens": 4, "seed": 1} | options
    answer = client.completions.create(**options)
    if not options.get("echo"):  # its first entry is null, which the package's type forgets
        Completion.model_validate(answer.model_dump())
    return answer


def test_completions(client: Any, bundle: Any) -> None:
    ids = bundle.tokenizer.encode("the rating")
    texts = {
        name: [choice.text for choice in completion(client, prompt=prompt).choices]
        for name, prompt in {"text": "the rating", "ids": ids, "texts": ["the rating", "fuel"],
                             "id lists": [ids, bundle.tokenizer.encode("fuel")]}.items()
    }  # fmt: skip
    assert texts["text"] == texts["ids"] == texts["texts"][:1]
    assert texts["texts"] == texts["id lists"] and len(texts["texts"]) == 2
    echoed = completion(client, echo=True, max_tokens=0)
    assert echoed.choices[0].text == "the rating"
    assert completion(client, echo=True).choices[0].text == "the rating" + texts["text"][0]
    several = completion(client, prompt=[" the  rating", "fuel"], n=2, echo=True, max_tokens=0)
    assert [choice.text for choice in several.choices] == [" the  rating"] * 2 + ["fuel"] * 2


def test_echo_gives_the_scores_of_the_prompt(client: Any, model: Any, bundle: Any) -> None:
    """As lm_eval's local-completions reads them: an entry a prompt token, and the new one."""
    ids = [5, 70, 9, 200, 31] * 27
    answer = completion(client, prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0)
    logprobs = answer.choices[0].logprobs
    with torch.inference_mode():
        truth = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    wanted = [truth[i, token].item() for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(logprobs.token_logprobs[1:-1], wanted, atol=0.01)
    best = truth.max(-1).values.tolist()
    tops = [max(top.values()) for top in logprobs.top_logprobs[1:]]
    np.testing.assert_allclose(tops, best, atol=0.01)
    assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
    chunks = [*client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0, stream=True
    )]  # fmt: skip
    streamed = [x for c in chunks if c.choices[0].logprobs
                for x in c.choices[0].logprobs.token_logprobs]  # fmt: skip
    assert streamed == logprobs.token_logprobs
    sizes = [len(c.choices[0].logprobs.tokens) for c in chunks if c.choices[0].logprobs]
    assert max(sizes) <= 1 + ECHOED < len(ids)  # a chunk is small, however long the prompt
    assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text


def test_offsets_tell_where_tokens_begin_in_the_text(client: Any, bundle: Any) -> None:
    """A token that is a part of a character begins where that does; a special one is no text."""
    echo = {"echo": True, "logprobs": 0, "max_tokens": 2, "logit_bias": {"70": 100}}
    ids = bundle.tokenizer.encode("é🙂x")
    for prompt, wanted in (("é🙂x", [0, 0, 1, 1, 1, 1, 2, 3, 4]),
                           ([0, *ids], [0, 0, 0, 1, 1, 1, 1, 2, 3, 4])):  # fmt: skip
        assert completion(client, prompt=prompt, **echo).choices[0].logprobs.text_offset == wanted
        chunks = client.completions.create(model="tiny", prompt=prompt, stream=True, **echo)
        scores = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        assert [offset for one in scores for offset in one.text_offset] == wanted
    alone = completion(client, prompt="é🙂x", **echo | {"echo": False})
    assert alone.choices[0].logprobs.text_offset == [0, 1]


def test_special_tokens_that_a_prompt_spells_out_are_text(client: Any) -> None:
    """An echo gives them back, so every token is found at its offset."""
    prompt = "<eos>fuel x<eos><eos>is a"
    echo = {"echo": True, "logprobs": 0, "max_tokens": 2, "logit_bias": {"70": 100}}
    (whole,) = completion(client, prompt=prompt, **echo).choices
    chunks = client.completions.create(model="tiny", prompt=prompt, stream=True, **echo)
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert whole.text.startswith(prompt)
    assert whole.logprobs.tokens.count("<eos>") == 3
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text.startswith(token, offset)
    assert whole.logprobs.text_offset[-2:] == [len(prompt), len(prompt) + 1]
    assert [offset for part in parts for offset in part.text_offset] == whole.logprobs.text_offset


def test_a_completion_keeps_its_first_blank(bundle: Any, serving: Any) -> None:
    """The decoder of Llama 2 and Mistral drops the blank before the first word of a text."""
    app = serve(bundle.path)
    served = app.state.service.worker(None).served
    vocabulary = {"<unk>": 0, "\u2581ab": 1, "c": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    served.tokenizer = Tokenizer(backend, {}, (0,), served.tokenizer.chat_template)
    asked = {"prompt": [1, 2], "logit_bias": {"1": 100}, "max_tokens": 2, "logprobs": 0}
    with serving(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (alone,) = completion(client, **asked).choices
        assert alone.text == " ab ab" and alone.logprobs.text_offset == [0, 3]
        (echoed,) = completion(client, echo=True, **asked).choices
        assert echoed.text == "abc ab ab" and echoed.logprobs.text_offset == [0, 2, 3, 6]


def test_the_time_to_the_first_token_counts_a_request_once(client: Any, application: Any) -> None:
    def count() -> float:
        registry = application.state.service.metrics.registry
        return registry.get_sample_value("cetane_first_token_seconds_count", {"model": "tiny"})

    before = count()
    completion(client, prompt=["the rating", "fuel"], n=2)
    assert count() == before + 1


def test_a_stop_token_is_scored_too(client: Any) -> None:
    """lm_eval drops the last entry: it must be there even if the model ends at once."""
    answer = completion(client, logit_bias={"0": 100}, max_tokens=1, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.text == "the rating"
    assert choice.logprobs.tokens[-1] == "<eos>"
    assert answer.usage.completion_tokens == 0


def test_models_and_tokenizer(client: Any, bundle: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny") == model
    ids = bundle.tokenizer.encode("fuel é")
    post = client.with_options(base_url=str(client.base_url).removesuffix("/v1/"))
    made = post.post("/tokenize", body={"prompt": "fuel é"}, cast_to=dict[str, Any])
    assert made == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
    assert post.post("/detokenize", body={"tokens": ids}, cast_to=dict[str, Any]) == {
        "prompt": "fuel é"
    }
    with pytest.raises(openai.BadRequestError, match="token 9999 is not in the vocabulary"):
        post.post("/detokenize", body={"tokens": [9999]}, cast_to=dict[str, Any])


WRONG = {
    "frequency_penalty": {"frequency_penalty": 3},
    "temperature": {"temperature": "warm"},
    "messages.0.content": {"messages": [{"role": "user", "content": 5}]},
    "messages.0": {"messages": [{"role": "king", "content": "x"}]},
    "top_logprobs": {"top_logprobs": 3},
    "n": {"n": 10000},
    "logit_bias": {"logit_bias": {"288": 1}},
    "tools": {"tools": [WEATHER | {"function": {"name": "no name!"}}]},
    "audio": {"extra_body": {"audio": {"voice": "x"}}},
    "tool_choice": {"tool_choice": "required"},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"not": {}}},
        }
    },
    "messages": {"messages": [{"role": "user", "content": "long " * 1200}]},
}


@pytest.mark.parametrize("param", WRONG)
def test_an_error_names_the_field(client: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **WRONG[param])
    assert error.value.body["param"].startswith(param)
    assert param.split(".")[0] in error.value.message
    assert error.value.body["type"] == "invalid_request_error"


def test_an_unknown_model(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, model="gpt-9")
    assert error.value.body["code"] == "model_not_found"
