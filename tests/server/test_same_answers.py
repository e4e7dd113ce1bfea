"""The same answer to the same seed: alone, among others, streamed or not, known or new."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from cetane.engine.generate import open_engine
from cetane.engine.prefixes import Prefixes


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
    (worker,) = application.state.service.workers.values()
    worker.served.prefixes = Prefixes(open_engine(bundle))


def test_alone_and_in_a_queue_of_32(client: openai.OpenAI, forgetful: None) -> None:
    alone = [ask(client, number) for number in range(32)]
    known = [ask(client, number) for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        queued = [*pool.map(lambda number: ask(client, number), range(32))]
        streamed = [*pool.map(lambda number: ask(client, number, stream=True), range(32))]
    assert alone == known == queued == streamed
    assert len(set(alone)) > 25
