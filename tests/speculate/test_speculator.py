"""Generation with drafts is generation without them, whatever is drafted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.parity import engine_of, tokens
from tests.families.recipes import subset_recipe

from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.schema.function import Step
from cetane.schema.slots import CONTRACTS
from cetane.speculate.controller import Controller
from cetane.speculate.draft_model import DraftModel
from cetane.speculate.drafter import Drafter, DraftTimes
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers, Suffix

PROMPT = 6
CONTEXT = 32
WIDTHS = range(2, 9)


class Scripted(Drafter):
    """Knows what comes, and says it, or something else, as the script has it."""

    name = "scripted"

    def __init__(self, future: Sequence[int], script: Sequence[tuple[int, int, list[int]]]) -> None:
        """`script`: for every proposal how many right tokens, how many beyond what was asked for,
        and what is said after the right ones."""
        self.future, self.script = list(future), list(script)
        self.tokens: list[int] = []
        self.asked: list[int] = []

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        self.tokens = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def propose(self, most: int) -> Draft:
        self.asked.append(most)
        right, beyond, wrong = self.script[len(self.asked) % len(self.script)]
        rest = self.future[len(self.tokens) :]
        said = [*rest[:right], *wrong, *rest] + [5] * (most + beyond)
        return Draft(tuple(said[: most + beyond]), self.name)


@dataclass
class Clock:
    """The time of a simulation, in plain steps."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def engines(tiny_engine: Callable[..., Engine], zaya_engine: Callable[..., Engine]) -> Any:
    """`engines(family, contract, width)`, made once; verifying calls are `width` tokens wide."""
    made: dict[tuple[str, str, int], Engine] = {}

    def engine(family: str, contract: str, width: int) -> Engine:
        key = (family, contract, width)
        if key not in made:
            if family == "llama":
                made[key] = tiny_engine(contract, tokens={"verify": width, "prefill": 16})
            else:
                routed = ["decode", "verify"] if width % 2 else []
                made[key] = zaya_engine(contract, verify=width, prefill=16, routed=routed)
        return made[key]

    return engine


def plain(engine: Engine, sampler: Sampler, max_new: int = 40, stop: Sequence[int] = ()) -> Any:
    session = engine.session()
    prompt = tokens(engine.plan.vocab)[:PROMPT]
    return list(generate(session, prompt, sampler, max_new, stop)), session.position


scripts = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(-9, 4),
        st.lists(st.integers(-1, 290), max_size=2),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "zaya"])
@given(
    script=scripts,
    width=st.sampled_from(WIDTHS),
    max_new=st.integers(1, 40),
    at=st.integers(0, 30),
    temperature=st.sampled_from([0.0, 1.0]),
    controlled=st.booleans(),
    others=st.lists(scripts, max_size=2),
)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_any_drafts_change_nothing(
    engines, family, contract, script, width, max_new, at, temperature, controlled, others
) -> None:
    """Right, wrong, too long, no tokens at all, past a stop token, past the end of the context.

    The drafts of several drafters become a tree, where the plan takes one.
    """
    engine = engines(family, contract, width)
    future, _ = plain(engine, Sampler(temperature, seed=4))
    stop = [future[at % len(future)]]
    expected, position = plain(engine, Sampler(temperature, seed=4), max_new, stop)
    session = engine.session()
    drafters = [Scripted(future, one) for one in (script, *others)]
    controller = Controller({w: [1.0 + w / 100] for w in (1, width, 16)}) if controlled else None
    speculator = Speculator(drafters, width - 1, controller)
    prompt = tokens(engine.plan.vocab)[:PROMPT]
    sampler = Sampler(temperature, seed=4)
    found = list(generate(session, prompt, sampler, max_new, stop, speculator))
    assert found == expected
    assert session.position == position
    assert all(asked <= width - 1 for drafter in drafters for asked in drafter.asked)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_drafts_that_are_always_right(engines, contract: str, width: int) -> None:
    engine = engines("llama", contract, width)
    future, _ = plain(engine, Sampler())
    drafter = Scripted(future, [(99, 0, [])])
    speculator = Speculator([drafter], width - 1)
    prompt = tokens(288)[:PROMPT]
    count = 1 + 2 * width
    found = list(generate(engine.session(), prompt, Sampler(), count, (), speculator))
    assert found == future[:count]
    assert speculator.summary() == {
        "verifier_calls": 2, "fallbacks": 0, "drafted": 2 * (width - 1),
        "accepted": 2 * (width - 1), "tokens": 2 * width, "acceptance": 1.0,
        "tokens_per_call": width, "break_even_acceptance": None,
        "draft_seconds": speculator.counters.draft_seconds,
        "read_seconds": speculator.counters.read_seconds,
    }  # fmt: skip


@pytest.mark.parametrize("contract", CONTRACTS)
def test_drafts_that_are_always_wrong(engines, contract: str) -> None:
    engine = engines("zaya", contract, 5)
    future, _ = plain(engine, Sampler())
    wrong = [(token + 1) % 101 for token in future]
    speculator = Speculator([Scripted(wrong, [(99, 0, [])])], 4)
    prompt = tokens(101)[:PROMPT]
    found = list(generate(engine.session(), prompt, Sampler(), 40, (), speculator))
    assert found == future
    summary = speculator.summary()
    assert summary["accepted"] == 0
    assert summary["tokens_per_call"] == 1
    assert summary["tokens"] == len(future) - 1


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", ["llama", "zaya"])
def test_every_drafter_and_all_together(engines, family: str, contract: str) -> None:
    engine = engines(family, contract, 4)
    expected, _ = plain(engine, Sampler())
    prompt = tokens(engine.plan.vocab)[:PROMPT]
    suffix, model = Suffix(EarlierAnswers()), DraftModel(engine, Sampler())
    for drafters in ([Ngram(1, 3)], [suffix], [suffix], [model], [suffix, Ngram(1), model]):
        speculator = Speculator(drafters, 3)
        found = list(generate(engine.session(), prompt, Sampler(), 40, (), speculator))
        assert found == expected
        if drafters == [model]:  # the target itself: all it says is right
            assert speculator.summary()["acceptance"] == 1
    suffix.close()
    assert suffix.answers.trie(None).find(expected[:3]) is not None


def test_a_conversation_goes_on(engines) -> None:
    """The session, and what drafters know of it, is used again."""
    engine = engines("llama", "readonly", 4)
    expected, _ = plain(engine, Sampler(), 16)
    prompt, session = tokens(288)[:PROMPT], engine.session()
    model = DraftModel(engine, Sampler())
    speculator = Speculator([model, Ngram(1)], 3)
    first = list(generate(session, prompt, Sampler(), 7, (), speculator))
    second = list(generate(session, first[-1:], Sampler(), 9, (), speculator))
    assert first + second == expected
    assert model.tokens == [*prompt, *first, *second]


def test_a_draft_model_that_samples(engines) -> None:
    """Drawn from the distribution it says, so that with the target as its own draft all counts."""
    engine = engines("llama", "readonly", 4)
    model = DraftModel(engine, Sampler(1.0, top_k=20, seed=1))
    speculator = Speculator([model], 3)
    prompt = tokens(288)[:PROMPT]
    sampler = Sampler(1.0, top_k=20, seed=2)
    assert len(list(generate(engine.session(), prompt, sampler, 20, (), speculator))) == 20
    assert speculator.summary()["acceptance"] == 1


def test_a_draft_model_draws_only_what_the_target_can_choose(engines) -> None:
    """As the target itself would, if it is the same model with a whole head: nothing is refused,
    and no draft ends early."""
    whole = engines("llama", "readonly", 4)
    some = engine_of(build_model("llama"), subset_recipe(range(0, 288, 3), 288))
    model = DraftModel(whole, Sampler(1.0, seed=1))
    speculator = Speculator([model], 3)
    prompt = tokens(288)[:PROMPT]
    sampler = Sampler(1.0, seed=2)
    assert len(list(generate(some.session(), prompt, sampler, 21, (), speculator))) == 21
    assert (speculator.counters.verifier_calls, speculator.counters.accepted) == (5, 15)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_draft_model_of_another_mind(engines, contract: str) -> None:
    """It goes back where its draft was refused, whatever its own contract."""
    target, other = engines("llama", "readonly", 4), engines("zaya", contract, 4)
    expected, _ = plain(other, Sampler(), 20)
    prompt, session = tokens(101)[:PROMPT], target.session()
    model = DraftModel(other, Sampler())
    model.begin(session, prompt)
    random, said = np.random.default_rng(0), []
    for token in expected[:12]:
        said.append(token)
        model.extend([token])
        count = int(random.integers(1, 5))
        assert list(model.propose(count).tokens) == expected[len(said) : len(said) + count]
        if len(said) == 6:  # what nobody would have drafted
            said.append((expected[6] + 1) % 101)
            model.extend(said[-1:])
            break
    fresh = other.session()
    logits = fresh.feed([*prompt, *said])
    assert model.propose(1).tokens == (int(logits.argmax()),)


class Says(Scripted):
    """Always drafts the same."""

    def __init__(self, draft: Draft) -> None:
        super().__init__((), ())
        self.draft = draft

    def propose(self, most: int) -> Draft:
        return self.draft


@pytest.mark.parametrize(("drawn", "kept"), [(False, (3, 4)), (True, (3, 4, 5, 6))])
def test_a_draft_ends_before_the_answer_does(engines, drawn: bool, kept: tuple[int, ...]) -> None:
    """A drawn token is judged whatever it is: else answers would follow another distribution."""
    session = engines("llama", "readonly", 8).session()
    distributions = np.full((4, session.plan.vocab), 1 / session.plan.vocab) if drawn else None
    speculator = Speculator([Says(Draft((3, 4, 5, 6), "scripted", distributions))], 7)
    speculator.begin(session, [1], [5, session.plan.vocab + 9])
    assert speculator.draft([2], 7).tokens == kept
    speculator.begin(session, [1])  # a token ends one answer, and not the next
    assert speculator.draft([2], 7).tokens == (3, 4, 5, 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_goes_no_further_than_the_answer(engines, temperature: float) -> None:
    engine = engines("llama", "readonly", 8)
    model = DraftModel(engine, Sampler(temperature, seed=4))
    model.begin(engine.session(), tokens(engine.plan.vocab)[:PROMPT])
    model.sampler = Sampler(temperature, seed=4)
    future = model.propose(20).tokens
    place = next(i for i, token in enumerate(future) if i and token not in future[:i])
    model.sampler, model.stop = Sampler(temperature, seed=4), [future[place]]
    assert model.propose(20).tokens == future[: place + 1]


def test_a_draft_model_is_ready_before_the_first_token(engines) -> None:
    """All its functions have run when it opens, and it reads a prompt with the target."""
    engine = engines("llama", "readonly", 4)
    engine.shards.restart_clocks()
    model = DraftModel(engine, Sampler())
    functions = {
        (step.shard, step.function)
        for mode in engine.plan.modes.values()
        for step in mode.steps
        if isinstance(step, Step)
    }
    assert functions <= set(engine.shards.times)
    prompt = tokens(288)[:PROMPT]
    stream = generate(engine.session(), prompt, Sampler(), 9, (), Speculator([model], 3))
    assert model.times.token > 0
    next(stream)
    assert model.fed == list(prompt) and model.own.position == PROMPT


def test_a_small_draft_model_drafts_from_the_first_answer_on(
    engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls take a tenth of a step; only the very first one prepares its functions, for 30."""
    engine, clock = engines("llama", "readonly", 4), Clock()
    prompt = tokens(288)[:PROMPT]
    expected, _ = plain(engine, Sampler(), 24)
    feed, evaluate, preparing = Session.feed, Session.evaluate, [30.0]

    def fed(session: Session, *given: Any) -> Any:
        if session.execution.shards is draft.shards:
            clock.now += preparing.pop() if preparing else 0.1
        return feed(session, *given)

    def evaluated(session: Session, new: Sequence[int], *given: Any) -> Any:
        clock.now += 1.0 if len(new) == 1 else 1.1
        return evaluate(session, new, *given)

    draft = Engine(engine.plan, engine.backend, engine.tables)
    monkeypatch.setattr(Session, "feed", fed)
    monkeypatch.setattr(Session, "evaluate", evaluated)
    for module in ("engine.generate", "speculate.timing", "speculate.speculator"):
        monkeypatch.setattr(f"cetane.{module}.time", clock)
    speculator = Speculator([DraftModel(draft, Sampler())], 3, Controller({1: [1.0], 4: [1.1]}))
    started = clock.now
    found = list(generate(engine.session(), prompt, Sampler(), 24, (), speculator))
    assert found == expected
    assert speculator.counters.accepted == speculator.counters.drafted > 12
    assert clock.now - started < 0.5 * len(found)


def test_the_controller_takes_the_draft_that_promises_most() -> None:
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.plain = 100.0
    speculator = Speculator([], 3, controller)
    long, short = Draft((1, 2, 3), "long"), Draft((1,), "short")
    assert speculator.pick([short, long]) == long
    for _ in range(9):
        controller.judge(long, [9], verified=True)
    assert speculator.pick([long, short]) == short
    assert speculator.pick([]).tokens == ()


def test_spare_columns_hold_the_branches_of_other_drafts() -> None:
    """A call of 4 has room for one more token after a draft of two."""
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.plain = 100.0
    for spec in (Speculator([], 3, controller), Speculator([], 3)):
        spec.proposals = [Draft((1, 2), "a"), Draft((1, 7, 8), "b")]
        assert spec.filled(Draft((1, 2), "a"), 3) == Draft((1, 2), "a")  # no trees here
        spec.trees = True
        filled = spec.filled(Draft((1, 2), "a"), 3)
        assert (filled.tokens, filled.parents) == ((1, 2, 7), (-1, 0, 0))
        assert spec.filled(NO_DRAFT, 3) == NO_DRAFT


class Dear(Scripted):
    """A drafter that takes long, and is not asked where it would not pay."""

    name = "dear"
    costly = True


@pytest.mark.parametrize(("sure", "asked"), [(True, False), (False, True)])
def test_a_costly_drafter_is_asked_where_look_ups_promise_less(sure: bool, asked: bool) -> None:
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.plain = 100.0
    controller.take_times("dear", DraftTimes(asking=0.0, token=0.1))
    for _ in range(20):
        controller.judge(Draft((1, 2, 3), "scripted"), [1, 2, 3, 4] if sure else [9], True)
        controller.judge(Draft((1, 2, 3), "dear"), [1, 2, 9], True)
    dear, cheap = Dear(range(9), [(9, 0, [])]), Scripted(range(9), [(9, 0, [])])
    speculator = Speculator([dear, cheap], 3, controller)
    speculator.possible = speculator.useful = np.ones(9, bool)
    assert speculator.draft([0], 3).kind == ("scripted" if sure else "dear")
    assert bool(dear.asked) == asked


def test_nobody_is_asked_before_the_account_affords_a_draft() -> None:
    """Its call takes 1.1 steps, which an answer may borrow after one plain step."""
    controller = Controller({1: [1.0], 4: [1.1]})
    drafter = Scripted(range(99), [(99, 0, [])])
    speculator = Speculator([drafter], 3, controller)
    speculator.possible = speculator.useful = np.ones(99, bool)
    steps = 0
    while not speculator.draft([0], 3).tokens:
        controller.settle(0, 1, 1.0)
        steps += 1
        assert drafter.asked == []
    assert steps == 1  # (1 + 1.1) * 0.97 <= 1 + 1 + 0.1


def test_a_resting_speculator_follows_and_drafts_nothing(engines) -> None:
    engine = engines("llama", "readonly", 4)
    expected, _ = plain(engine, Sampler())
    drafter = Scripted(expected, [(99, 0, [])])
    speculator = Speculator([drafter], 3)
    speculator.resting = True
    prompt = tokens(288)[:PROMPT]
    assert list(generate(engine.session(), prompt, Sampler(), 9, (), speculator)) == expected[:9]
    assert speculator.summary()["drafted"] == 0
    assert drafter.tokens == expected[:9]


def test_what_was_read_of_a_closed_stream_is_learned(engines) -> None:
    engine = engines("llama", "readonly", 4)
    suffix = Suffix(EarlierAnswers())
    session, prompt = engine.session(), tokens(288)[:PROMPT]
    stream = generate(session, prompt, Sampler(), 20, (), Speculator([suffix], 3))
    read = [next(stream) for _ in range(5)]
    stream.close()
    suffix.close()
    assert suffix.answers.trie(None).find(read) is not None


def test_an_answer_that_was_stopped_within_a_step_is_learned(
    engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C stops it, with the tokens that were read, each of them once."""
    engine = engines("llama", "readonly", 4)
    expected, _ = plain(engine, Sampler())
    suffix = Suffix(EarlierAnswers())
    session, prompt = engine.session(), tokens(288)[:PROMPT]
    stream = generate(session, prompt, Sampler(), 20, (), Speculator([suffix], 3))
    read = [next(stream) for _ in range(5)]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert read == expected[:5]
    assert suffix.tokens == [*prompt, *read]
    suffix.close()
    assert suffix.answers.trie(None).find(read) is not None


def test_no_drafts_at_all() -> None:
    with pytest.raises(CetaneError, match="need at least 1"):
        Speculator([Ngram()], 0)


class Silent(Drafter):
    name, costly = "silent", True
    times = DraftTimes(asking=0.0, token=0.1)

    def propose(self, most: int) -> Draft:
        return NO_DRAFT


def test_a_drafter_that_says_nothing_shows_no_cost() -> None:
    """It would look free when it drafts at last."""
    controller = Controller({1: [1.0], 4: [1.0]})
    assert Speculator([Silent()], 3, controller).ask(Silent(), 3) == NO_DRAFT
    assert controller.lateness["silent"].usual == 1
