"""Conversations that a model writes: the template, whose turn it is, and what is greedy."""

from collections.abc import Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import build_model

from cetane.fitting import conversations
from cetane.fitting.conversations import (
    ChatTurn,
    ConversationWriter,
    Writing,
    turn_of,
    write_conversations,
)

START, ASK, STOP, ANSWER = 900, 901, 902, 903
"""Special tokens of a template."""


class Words:
    """A tokenizer with a chat template: a word is a number, and special tokens vanish in text."""

    has_chat_template = True
    eos_ids = (STOP,)

    def __init__(self, end: int = STOP) -> None:
        self.end = end

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        words = [sum(map(ord, word)) % 900 for word in messages[0]["content"].split()]
        return [START, ASK, *words, self.end, ANSWER]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(str(token) for token in ids if token < START)


def test_a_template_is_what_two_questions_share() -> None:
    words: Any = Words()
    assert turn_of(words) == ChatTurn([START, ASK], [STOP, ANSWER])


def test_no_turn_where_nobody_can_tell_its_end() -> None:
    plain: Any = SimpleNamespace(has_chat_template=False)
    assert turn_of(plain) is None
    ends_in_a_word: Any = Words(end=7)
    assert turn_of(ends_in_a_word) is None


def test_a_model_writes_every_other_question_itself() -> None:
    """Its question is drawn up to the token that ends it, its answer greedy up to a stop token."""
    writer = ConversationWriter(ChatTurn([1, 2], [8, 9]), repeat([1, 2, 5, 8, 9]), ends=(8,))
    said = iter([0, 0, 31, 32, 8, 0, 41, 42, 8])  # what a model would draw, or finds likeliest
    own = []
    for token in said:
        own.append(writer.next(-1, token) if writer.draws else writer.next(token, -1))
    assert own == [1, 2, 31, 32, 8, 9, 41, 42, 8]
    assert [writer.next(0, 0) for _ in range(5)] == [1, 2, 5, 8, 9]  # a given one
    assert not writer.draws


def test_long_questions_and_answers_end() -> None:
    writing = Writing(question=3, answer=2)
    writer = ConversationWriter(ChatTurn([1], [8, 9]), repeat([6, 7]), ends=(8,), writing=writing)
    assert [writer.next(40, 30) for _ in range(9)] == [1, 30, 30, 8, 9, 40, 40, 6, 7]


def test_few_questions_are_listed() -> None:
    writing = Writing(question=2, answer=1, listed=3)
    writer = ConversationWriter(ChatTurn([1], [8, 9]), repeat([6, 7]), ends=(8,), writing=writing)
    own = [1, 30, 8, 9, 40]
    assert [writer.next(40, 30) for _ in range(18)] == [*own, *own, 6, 7, 40, *own]


def test_without_a_turn_all_questions_are_given() -> None:
    writer = ConversationWriter(None, iter([[1, 2], [3, 4]]), ends=(8,))
    assert [writer.next(8, 0) for _ in range(5)] == [1, 2, 8, 3, 4]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_answers_are_those_of_each_sequence_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions of unequal lengths, and greedy answers as transformers makes them one by one."""
    given = {"5 6 7": [5, 6, 7], "8": [8], "9 10": [9, 10]}
    numbers: Any = SimpleNamespace(has_chat_template=False, encode=given.__getitem__, eos_ids=(3,))
    model = build_model(kind)
    monkeypatch.setattr(conversations, "questions", lambda: list(given))
    made = write_conversations(model, numbers, 3, 12, 0)
    assert made.shape == (3, 12) and made.dtype == torch.int64
    for row, prompt in zip(made.tolist(), given.values(), strict=True):
        text = list(prompt)
        while len(text) < len(row) and text[-1] != 3:
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
        assert row[: len(text)] == text
