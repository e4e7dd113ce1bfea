"""The same answer to the same seed: alone, among others, streamed or not, known or new."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from cetane.engine.open import open_engine
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler
from cetane.server.app import serve
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Speculator


def ask(client: openai.OpenAI, number: int, stream: bool = False) -> str:
    text = "the rating of a fuel " * (number % 5) + f"client {number}"
    options: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}],
                               "seed": number, "max_tokens": 6, "temperature": 1.2}  # fmt: skip
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.content or ""
    chunks = client.chat.completions.create(stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.fixture
def forgetful(application: Any, bundle: Any) -> None:
    """The server without what it knows of earlier prompts."""
    (worker,) = application.state.service.workers
    worker.served.prefixes = Prefixes(open_engine(bundle))


def test_drafts_change_nothing_but_the_speed(
    client: openai.OpenAI, application: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = application.state.service.workers

    def always(sampler: Sampler) -> Speculator:
        return Speculator([Ngram()], 3)

    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "fuel " * 12, "max_tokens": 40, "logprobs": 2,
        "temperature": 0, "logit_bias": {"0": -100}, "stop": ["never this"],
        "extra_body": {"response_format": {"type": "regex", "regex": "(fuel |rating ){4,9}"}},
    }  # fmt: skip
    plain = client.completions.create(seed=1, **asked)
    monkeypatch.setattr(worker.served, "speculator", always)
    drafted = client.completions.create(**asked)
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 5
    (one,), (other,) = plain.choices, drafted.choices
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert one.logprobs.tokens == other.logprobs.tokens
    stopped = [
        client.completions.create(**seed, **asked | {"stop": ["l rating", "l fuel f"]}).choices[0]
        for seed in ({"seed": 1}, {})
    ]
    assert stopped[0].logprobs.tokens == stopped[1].logprobs.tokens
    assert stopped[0].finish_reason == stopped[1].finish_reason == "stop"
    np.testing.assert_allclose(
        one.logprobs.token_logprobs, other.logprobs.token_logprobs, atol=1e-4
    )


@pytest.mark.parametrize("count", range(1, 10))
def test_usage_counts_only_drafts_of_the_answer(
    client: openai.OpenAI, application: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Of every four tokens after the first, three are drafted. A stop text ends the answer among
    them."""
    (worker,) = application.state.service.workers
    monkeypatch.setattr(worker.served, "speculator", lambda _: Speculator([Ngram()], 3))
    text = worker.served.tokenizer.decode([70]) * count
    usage = client.completions.create(
        model="tiny", prompt=[70] * 12, logit_bias={"70": 100}, max_tokens=40, temperature=0,
        stop=text,
    ).usage  # fmt: skip
    details = usage.completion_tokens_details
    assert usage.completion_tokens == count
    assert details.accepted_prediction_tokens == (count - 1) - (count - 1) // 4
    verified = -(-(count - 1) // 4) * 3
    rejected = verified - details.accepted_prediction_tokens
    assert details.rejected_prediction_tokens == rejected


def test_alone_and_in_a_queue_of_32(client: openai.OpenAI, forgetful: None) -> None:
    alone = [ask(client, number) for number in range(32)]
    known = [ask(client, number) for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        queued = [*pool.map(lambda number: ask(client, number), range(32))]
        streamed = [*pool.map(lambda number: ask(client, number, stream=True), range(32))]
    assert alone == known == queued == streamed
    assert len(set(alone)) > 25


def test_a_bundle_drafts_for_itself_in_long_texts(
    tiny_bundle: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default drafters hold it. Its answers are plain ones, also after a known prefix."""
    cache = {"contract": "readonly", "context": 160, "capacities": [32]}
    served = tiny_bundle(verify=4, cache=cache, layout={"kind": "single"})
    app = serve(served.path)
    (worker,) = app.state.service.workers
    default = worker.served.speculator(Sampler())
    assert [drafter.name for drafter in default.drafters] == ["suffix", "ngram", "triforce"]

    def always(sampler: Sampler) -> Speculator | None:
        return None if sampler.seed is not None else Speculator([default.drafters[-1]], 3)

    monkeypatch.setattr(worker.served, "speculator", always)
    prompt = np.random.default_rng(3).integers(1, 288, 70).tolist()
    with serving(app) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for longer in (prompt, [*prompt, 9, 40, 77]):
            asked: dict[str, Any] = {"model": "tiny", "prompt": longer, "max_tokens": 50,
                                     "temperature": 0}  # fmt: skip
            drafted = client.completions.create(**asked)
            plain = client.completions.create(seed=1, **asked)
            assert drafted.choices[0].text == plain.choices[0].text
            assert drafted.usage.completion_tokens_details.accepted_prediction_tokens
