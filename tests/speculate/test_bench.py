"""What drafts gain, with all their costs; drafters asked turn by turn, and tries that remember."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from cetane.engine.execution import Watch
from cetane.engine.session import Session
from cetane.errors import CetaneError
from cetane.prompts import conversations
from cetane.schema.plan import Plan
from cetane.speculate import bench
from cetane.speculate.bench import Generation, Trial, first_tokens_by_turn
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Counters
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


def test_an_answer_of_one_token_has_no_speed() -> None:
    """It is left out; if all are such, the benchmark says so."""

    def of(tokens: int, seconds: float) -> list[Generation]:
        return [Generation([*range(tokens)], seconds, 1.0, 0.0)]

    counters, costs = Counters(fallbacks=9), {1: [1.0]}
    speed = bench.summary(
        "chat", "auto", [of(1, 0.0), of(5, 4.0), of(0, 0.0)], [of(1, 0.0), of(5, 2.0), of(0, 0.0)],
        counters, costs,
    )  # fmt: skip
    assert (speed.prompts, speed.tokens, speed.ratio, speed.slowest) == (1, 4, 2.0, 2.0)
    with pytest.raises(CetaneError, match="chat: every answer ends with its first token"):
        bench.summary("chat", "auto", [of(1, 0.0)], [of(1, 0.0)], counters, costs)


class Reader(Ngram):
    """A drafter that takes long to read a prompt."""

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        time.sleep(0.1)
        super().begin(session, tokens)

    def read(self) -> None:
        time.sleep(0.2)


def test_reading_a_prompt_costs(tiny_engine) -> None:
    """By the clock and by calls, although it comes before the first token."""
    quick, slow = bench.compare(
        Trial(tiny_engine(), 8), {"chat": [[5, 9, 5, 9]]},
        {"quick": lambda: [Ngram()], "slow": lambda: [Reader()]},
        {1: [0.1], 4: [9.0]}, 3, 1, lambda *_: None,
    )  # fmt: skip
    assert slow.first_speculative > slow.reading >= 0.3 > quick.reading
    assert slow.tokens / slow.speculative > 0.3
    assert slow.ratio == pytest.approx(slow.speculative / slow.plain)
    assert slow.slowest == slow.ratio < 1
    # Seven steps of 0.1 s, since a call of four never pays, and 0.3 s of reading.
    assert slow.by_calls == pytest.approx(0.7 / (0.7 + slow.reading), rel=0.05)
    assert slow.by_calls < 0.8 < quick.by_calls


class Seeing(Ngram):
    """A drafter that sees hidden states, as a draft head does."""

    def watch(self, plan: Plan) -> Watch:
        return lambda *_: None


@pytest.mark.parametrize("sees", [True, False])
def test_all_sides_cut_a_prompt_alike(
    tiny_engine, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """Where one drafter needs all layers in silent calls, all sessions run them."""
    engine = tiny_engine()
    make, opened = engine.session, list[tuple[bool, bool]]()

    def session(**options: Any) -> Session:
        opened.append((options["whole"], bool(options["watch"])))
        return make(**options)

    monkeypatch.setattr(engine, "session", session)
    drafters = {"one": lambda: [Seeing() if sees else Ngram()], "other": lambda: [Ngram()]}
    bench.compare(
        Trial(engine, 4), {"chat": [[5, 9, 5, 9]]}, drafters, {1: [1.0], 4: [1.1]}, 3, 1,
        lambda *_: None,
    )  # fmt: skip
    assert opened[1:] == [(sees, False), (sees, sees), (sees, False)]  # the first warms up


def test_conversations_have_as_many_turns() -> None:
    assert {len(talk) for talk in conversations()} == {4}


def test_what_was_answered_is_known(tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversation twice: the trie knows nothing of the first, and all of the second."""
    monkeypatch.setattr(bench, "conversations", lambda: [["ab", "c"], ["ab", "c"]])
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
