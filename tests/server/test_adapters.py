"""Adapters behind OpenAI's API: each is a model of its own, `BUNDLE:ADAPTER`."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from cetane.server.app import serve


@pytest.fixture(scope="module")
def adapters_client(adapted: Any) -> Iterator[openai.OpenAI]:
    from tests.server.conftest import running

    app = serve(adapted.bundle.path, speculation=False)
    with running(app) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_models_lists_them(adapters_client: openai.OpenAI) -> None:
    listed = {model.id: model.model_dump()["parent"] for model in adapters_client.models.list()}
    assert listed == {"tiny": None, "tiny:dora": "tiny", "tiny:plain": "tiny"}
    assert adapters_client.models.retrieve("tiny:dora").id == "tiny:dora"


def test_each_answers_as_its_merged_model(adapters_client: openai.OpenAI, adapted: Any) -> None:
    prompt = [9, 40, 77, 5, 130, 61, 8, 200, 33, 21]
    texts = set()
    for name, adapter in {"tiny": None, "tiny:plain": "plain", "tiny:dora": "dora"}.items():
        for _ in range(2):  # the second time from known prefixes
            answer = adapters_client.completions.create(
                model=name, prompt=prompt, max_tokens=8, temperature=0
            )
        with torch.inference_mode():
            ids = (
                adapted.merged[adapter]
                .generate(
                    torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
                )[0]
                .tolist()[len(prompt) :]
            )
        kept = ids[: ids.index(0)] if 0 in ids else ids
        decoded = adapted.bundle.tokenizer.decode(kept)
        assert answer.choices[0].text == decoded.rstrip("\N{REPLACEMENT CHARACTER}")
        assert answer.model == name
        texts.add(answer.choices[0].text)
    assert len(texts) > 1


def test_an_unknown_adapter_is_no_model(adapters_client: openai.OpenAI) -> None:
    for name in ("tiny:other", "tiny:", ":plain", "plain"):
        with pytest.raises(openai.NotFoundError, match=f"no {name!r}"):
            adapters_client.completions.create(model=name, prompt="x", max_tokens=1)
