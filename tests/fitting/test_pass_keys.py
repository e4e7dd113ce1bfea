"""Texts that hide pass keys, and the count of those that a model finds."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import build_model

from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.fitting.pass_keys import DIGITS, NAMES, found, hide


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
    again = hide(tokenizer, hay, 700, seed=3, keys=4)
    assert again == keys and hide(tokenizer, hay, 700, seed=4, keys=4) != keys


def test_the_count_is_of_greedy_answers(tokenizer: Tokenizer) -> None:
    """Questions after one reading of the text: as after the text itself, each alone."""
    model = build_model("llama", max_position_embeddings=512)
    keys = hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 300, seed=0, keys=3)
    expected = []
    for question in keys.questions:
        tokens = torch.tensor([[*keys.text, *question.asked, *question.answer]])
        with torch.no_grad():
            best = model(tokens).logits[0].argmax(-1)[-len(question.answer) - 1 : -1]
        expected.append(best.tolist() == list(question.answer))
    assert found(model, keys) == expected


def test_a_model_that_knows_finds_them(tokenizer: Tokenizer) -> None:
    """A model that always says the next token of one key finds that key and no other."""
    keys = hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 300, seed=0, keys=3)
    known = [*keys.questions[1].asked, *keys.questions[1].answer]

    def model(tokens: torch.Tensor, logits_to_keep: int, past_key_values: Any, **_: Any) -> Any:
        count = tokens.shape[1]
        states = torch.zeros(1, 1, count, 1)
        past_key_values.update(states, states, 0)
        logits = torch.zeros(1, logits_to_keep, 400)
        for row, at in enumerate(range(len(known) - logits_to_keep, len(known))):
            logits[0, row, known[at]] = 1
        return SimpleNamespace(logits=logits)

    assert found(model, keys) == [False, True, False]
