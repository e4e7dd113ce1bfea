"""Answers that a model writes side by side: each as it would be alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import build_model

from cetane.checkpoint import open_checkpoint
from cetane.fitting import answers
from cetane.fitting.answers import greedy, questions, write_answers
from cetane.speculate.bench import conversations, suite

FULL = "full_attention"


def test_no_question_is_a_prompt_of_the_suite() -> None:
    asked = questions()
    assert len(asked) == len(set(asked)) > 1000
    prompts = {prompt for group in suite().values() for prompt in group}
    assert not prompts & set(asked)
    assert not {turn for talk in conversations() for turn in talk} & set(asked)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("gemma3_text", {"layer_types": ["sliding_attention", FULL], "sliding_window": 8}),
    ],
)
def test_side_by_side_as_alone(kind: str, config: dict[str, Any]) -> None:
    """Prompts of unequal lengths; an answer ends with the first stop token."""
    model = build_model(kind, **config)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 280, (n,), generator=draw).tolist() for n in (3, 11, 7, 20)]
    alone = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(14):
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
        alone.append(text)
    assert greedy(model, prompts, 14, ()) == alone
    stop = alone[1][11 + 4]
    found = greedy(model, prompts, 14, (stop,))
    for text, prompt, whole in zip(found, prompts, alone, strict=True):
        said = whole[len(prompt) :]
        end = said.index(stop) + 1 if stop in said else len(said)
        assert text == whole[: len(prompt) + end]


def test_texts_give_back_their_tokens(
    tiny_checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model = open_checkpoint(tiny_checkpoint_folder).tokenizer, build_model("llama")
    monkeypatch.setattr(answers, "LENGTH", 6)
    asked = ["a fuel", "ignites.", "a fuel ignites. a fuel"]
    batches = list(write_answers(model, tokenizer, asked, batch=2))
    assert len(batches) == 2
    for text in (text for batch in batches for text in batch):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert any(tokenizer.decode(ids).startswith(question[:6]) for question in asked)
