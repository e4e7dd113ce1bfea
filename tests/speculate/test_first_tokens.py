"""Drafters that are asked turn by turn of a conversation."""

from collections.abc import Sequence

import pytest

from cetane.prompts import conversations
from cetane.speculate import first_tokens
from cetane.speculate.first_tokens import first_tokens_by_turn
from cetane.speculate.ngram import Ngram
from cetane.speculate.suffix import EarlierAnswers, Suffix

COUNT = 12


class Letters:
    """A tokenizer whose tokens are characters; it waits until all answers are in the trie."""

    eos_ids = ()

    def __init__(self, answers: EarlierAnswers) -> None:
        self.answers, self.asked = answers, []  # type: ignore[var-annotated]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.answers.thread.submit(int).result()  # behind all answers
        self.asked.append([message["role"] for message in messages])
        text = "".join(message["role"][0] + message["content"] for message in messages)
        return [ord(letter) % 280 + 1 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)


def test_conversations_have_as_many_turns() -> None:
    assert {len(talk) for talk in conversations()} == {4}


def test_what_was_answered_is_known(tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversation twice: the trie knows nothing of the first, and all of the second."""
    monkeypatch.setattr(first_tokens, "conversations", lambda: [["ab", "c"], ["ab", "c"]])
    answers = EarlierAnswers()
    tokenizer, drafters = Letters(answers), [Suffix(answers, 0.0), Ngram()]
    turns = first_tokens_by_turn(tiny_engine(), tokenizer, drafters, COUNT)  # type: ignore[arg-type]
    assert tokenizer.asked == [["user"], ["user", "assistant", "user"]] * 2
    assert [[one.drafter for one in asked] for asked in turns] == [drafters, drafters]
    for suffix, ngram in turns:
        assert len(suffix.right) == len(ngram.right) == 2 * (COUNT - 1)
        later = slice(COUNT - 1, None)
        assert all(suffix.proposed[later]) and all(suffix.right[later])
    assert not any(turns[0][0].proposed[:2])  # an empty trie
