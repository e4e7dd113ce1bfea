"""Texts that hide pass keys, and the count of those that a model finds."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import build_model

from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.errors import CetaneError
from cetane.fitting.pass_keys import DIGITS, NAMES, found, hide

FULL = "full_attention"


@pytest.fixture
def tokenizer(tiny_checkpoint_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_checkpoint_folder).tokenizer


def test_keys_lie_evenly_and_fit(tokenizer: Tokenizer) -> None:
    hay = tokenizer.encode_plain("a fuel ignites. ") * 200
    keys = hide(tokenizer, hay, 700, seed=3, keys=4)
    whole, answers = keys.whole
    assert len(whole) <= 700
    starts = [question.place.start for question in keys.questions]
    apart = {b - a for a, b in pairwise(starts)}
    assert min(apart) > 100 and max(apart) - min(apart) < 40  # the same place of each stretch
    said = tokenizer.decode(keys.text)
    for question, place in zip(keys.questions, answers, strict=True):
        digits = tokenizer.decode(question.answer).strip()
        assert len(digits) == DIGITS and digits.isdigit()
        sentence = tokenizer.decode(keys.text[question.place.start : question.place.stop])
        assert sentence in said and sentence.endswith(f" is {digits}")
        assert sum(name in sentence for name in NAMES) == 1
        assert tuple(whole[place.start : place.stop]) == question.answer
    longer = hide(tokenizer, hay, 2 * len(hay), seed=3, keys=4)
    assert len(longer.whole[0]) > 2 * len(hay) - 20, "a short text is said again"
    again = hide(tokenizer, hay, 700, seed=3, keys=4)
    assert again == keys and hide(tokenizer, hay, 700, seed=4, keys=4) != keys


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("gemma3_text", {"layer_types": ["sliding_attention", FULL], "sliding_window": 32}),
        ("lfm2", {"layer_types": ["conv", FULL]}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", FULL]}),
    ],
)  # fmt: skip
def test_the_count_is_of_greedy_answers(
    kind: str, config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Questions after one reading of the text: as after the text itself, each alone. So for layers
    that keep a window, a history or a matrix too."""
    model = build_model(kind, max_position_embeddings=512, **config)
    keys = hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 300, seed=0, keys=3)
    assert found(model, keys) == [False] * 3  # it knows nothing
    asked = []
    for question in keys.questions:
        tokens = [*keys.text, *question.asked]
        for _ in question.answer:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answer = tuple(tokens[-len(question.answer) :])
        asked.append(replace(question, answer=answer))
    asked[1] = replace(asked[1], answer=(*asked[1].answer[:-1], asked[1].answer[-1] ^ 1))
    assert found(model, replace(keys, questions=tuple(asked))) == [True, False, True]


def test_a_model_that_knows_finds_them(tokenizer: Tokenizer) -> None:
    """A model that always says the next token of one key finds that key and no other."""
    keys = hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 300, seed=0, keys=3)
    known = [*keys.questions[1].asked, *keys.questions[1].answer]

    def forward(tokens: torch.Tensor, logits_to_keep: int, cache: Any, **_: Any) -> Any:
        count = tokens.shape[1]
        states = torch.zeros(1, 1, count, 1)
        cache.update(states, states, 0)
        logits = torch.zeros(1, logits_to_keep, 400)
        for row, at in enumerate(range(len(known) - logits_to_keep, len(known))):
            logits[0, row, known[at]] = 1
        return SimpleNamespace(logits=logits)

    model = build_model("llama")
    model.forward = forward
    assert found(model, keys) == [False, True, False]


def test_keys_without_room_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(CetaneError, match=r"4 pass keys .* tokens, of 100 \(ask for longer"):
        hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 100, seed=0, keys=4)
