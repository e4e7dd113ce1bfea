"""What drafts gain, with all their costs."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from cetane.engine.execution import Watch
from cetane.engine.session import Session
from cetane.schema.plan import Plan
from cetane.speculate import bench
from cetane.speculate.bench import Generation, Trial
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Counters


def test_an_answer_of_one_token_has_no_speed() -> None:
    """It is left out. If all are such, the category has none, but its tokens are compared."""

    def of(tokens: int, seconds: float) -> list[Generation]:
        return [Generation([*range(tokens)], seconds, 1.0, 0.0)]

    counters, costs = Counters(fallbacks=9), {1: [1.0]}
    speed = bench.summary(
        "chat", "auto", [of(1, 0.0), of(5, 4.0), of(0, 0.0)], [of(1, 0.0), of(5, 2.0), of(0, 0.0)],
        counters, costs,
    )  # fmt: skip
    assert (speed.prompts, speed.tokens, speed.ratio, speed.slowest) == (1, 4, 2.0, 2.0)
    for drafted, same in ((1, True), (2, False)):
        speed = bench.summary("chat", "auto", [of(1, 0.0)], [of(drafted, 0.0)], counters, costs)
        assert speed.plain is speed.speculative is speed.ratio is speed.by_calls is None
        assert (speed.prompts, speed.first_plain, speed.same) == (0, 1.0, same)


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
