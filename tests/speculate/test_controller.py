"""The controller in a simulated world, where times and acceptance are known exactly."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.engine.call import line
from cetane.engine.verify import Draft
from cetane.speculate.controller import Controller, Odds
from cetane.speculate.drafter import DraftTimes
from cetane.speculate.timing import LEAST, RECENT, measure_calls

DEAR = "dear"
"""The drafter of a world in which drafts are costly."""


@dataclass
class World:
    """Calls of width w take `times[w]`; a drafted token of a kind is right with some chance."""

    times: dict[int, float]
    chances: dict[str, float]
    seed: int = 0
    proposing: float = 0.0
    """Seconds per drafted token, where drafts are costly."""
    noise: float = 0.0
    used: dict[str, int] = field(default_factory=dict)

    def controller(self) -> Controller:
        controller = Controller({width: [time] * 3 for width, time in self.times.items()})
        if self.proposing:
            controller.take_times(DEAR, DraftTimes(asking=0.0, token=self.proposing))
        return controller

    def generate(self, controller: Controller, tokens: int, most: int) -> float:
        """Speed relative to plain of one generation, in which every step has a draft."""
        random = np.random.default_rng(self.seed)
        kinds = list(self.chances)
        controller.begin()
        made, spent = 0, 0.0
        while made < tokens:
            kind = kinds[int(random.integers(len(kinds)))]
            longest = min(most, tokens - made - 1)
            drafter = DEAR if self.proposing else None
            drafted = controller.length(kind, line(longest), drafter)
            proposing = self.proposing * drafted
            controller.spent += proposing  # as the speculator does before it picks a draft
            drafted = controller.length(kind, line(drafted)) if drafted else 0
            right = random.random(drafted) < self.chances[kind]
            accepted = int(np.cumprod(right).sum())
            seconds = self.times[controller.width(1 + drafted)]
            seconds *= 1 + self.noise * random.random()
            controller.settle(drafted, 1 + accepted, seconds)
            if drafted:
                new = [*range(accepted), -1]
                controller.judge(Draft(tuple(range(drafted)), kind), new, verified=True)
                self.used[kind] = self.used.get(kind, 0) + 1
            else:
                controller.skip(kind)
            spent += seconds + proposing
            made += 1 + accepted
        return tokens * self.times[1] / spent


@given(
    ratio=st.floats(1.0, 6.0),
    chances=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=5),
    most=st.integers(1, 7),
    proposing=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_no_generation_is_slower_than_its_bound(
    ratio, chances, lengths, most, proposing, seed
) -> None:
    """However bad or dear the drafts, from the first token of the first generation on."""
    kinds = {f"kind-{i}": chance for i, chance in enumerate(chances)}
    world = World({1: 1.0, 4: ratio, 8: 1.4 * ratio}, kinds, seed, proposing)
    controller = world.controller()
    for tokens in lengths:
        world.seed += 1
        lent = min(1, 2 / tokens)
        assert world.generate(controller, tokens, most) >= 0.97 / (1 + lent) - 1e-9


@pytest.mark.parametrize(("chance", "least"), [(1.0, 3.0), (0.9, 2.5), (0.7, 1.75), (0.4, 1.2)])
def test_good_drafts_pay_nearly_all_they_can(chance: float, least: float) -> None:
    world = World({1: 1.0, 4: 1.1}, {"good": chance})
    assert world.generate(world.controller(), 300, 3) >= least


def test_bad_kinds_are_left_and_good_ones_kept() -> None:
    world = World({1: 1.0, 4: 1.6}, {"good": 0.95, "bad": 0.02})
    speed = world.generate(world.controller(), 600, 3)
    assert world.used["bad"] < 20
    assert world.used["good"] > 80
    assert speed > 1.2


def test_a_kind_that_gets_better_is_found() -> None:
    world = World({1: 1.0, 4: 1.6}, {"only": 0.0})
    controller = world.controller()
    world.generate(controller, 200, 3)
    world.chances["only"] = 1.0
    world.generate(controller, 600, 3)
    assert world.generate(controller, 100, 3) > 1.8


def test_a_call_that_no_draft_can_pay_is_never_made() -> None:
    """The seed's ZAYA: a call of four took more than four plain steps."""
    world = World({1: 109.0, 4: 483.0}, {"only": 1.0})
    controller = world.controller()
    world.generate(controller, 2000, 3)
    assert not world.used
    assert controller.break_even(3) == pytest.approx((483 / 109 - 1) / 3)
    assert controller.break_even(3) > 1


def test_a_call_that_is_quicker_than_a_step_pays_without_a_right_token() -> None:
    world = World({1: 1.1, 4: 1.0}, {"only": 0.0})
    controller = world.controller()
    world.generate(controller, 200, 3)
    assert controller.break_even(3) == 0


def test_the_length_is_the_one_that_pays_most() -> None:
    """Beyond 3 tokens a draft needs a call of 16, which only sure ones are worth."""
    for chance, expected in ((1.0, 15), (0.5, 3)):
        world = World({1: 1.0, 4: 1.2, 16: 3.0}, {"only": chance})
        controller = world.controller()
        for _ in range(20):
            world.generate(controller, 200, 15)
        controller.plain += 100.0
        assert controller.length("only", line(15)) == expected


def test_costly_drafts_are_shorter() -> None:
    """A doubtful draft is cut though the call has room, when every token costs something."""
    lengths = {}
    for proposing in (0.0, 0.2):
        world = World({1: 1.0, 8: 1.3}, {"only": 0.7}, proposing=proposing)
        controller = world.controller()
        for _ in range(10):
            world.generate(controller, 200, 7)
        controller.plain += 100.0
        lengths[proposing] = controller.length("only", line(7), DEAR if proposing else None)
    assert lengths[0.0] == 7
    assert 1 <= lengths[0.2] <= 5


def test_a_tree_is_worth_what_its_branches_are() -> None:
    """Two tokens after the text, right in 3 and 1 of 5; one after the first, always right."""
    odds, tree = Odds(), Draft((7, 8, 9), branches=(-1, -1, 0))
    for turn in range(300):
        new = [[7, 9, 1], [8, 1], [7, 9, 1], [1], [7, 9, 1]][turn % 5]
        odds.judge(tree, new, verified=False)
    chances = odds.chances(tree.parents)
    assert chances[0] == pytest.approx(0.6, abs=0.1)
    assert chances[1] == pytest.approx(0.2, abs=0.1)
    assert chances[2] == pytest.approx(chances[0], abs=0.1)
    assert sum(chances[:2]) <= 1
    assert sum(odds.chances([-1, 0])) > sum(odds.chances([-1, -1]))


def test_a_proposal_teaches_though_it_is_not_verified() -> None:
    """The target's own token shows whether the first one was right, and says nothing of others."""
    controller, draft = Controller({1: [1.0], 4: [1.5]}), Draft((3, 4, 5), "kind")
    before = controller.gain("kind", draft.parents)
    for _ in range(20):
        controller.judge(draft, [9], verified=False)
    assert controller.gain("kind", draft.parents) < 0.75 < before
    assert controller.odds["kind"].skips == 20
    for _ in range(20):
        controller.judge(draft, [3], verified=False)
    assert controller.gain("kind", draft.parents) > 1.5


def test_a_drafter_is_judged_by_its_sure_and_unsure_drafts_together() -> None:
    """What it proposes is known only when it was asked: its kinds part then."""
    controller = Controller({1: [1.0], 4: [1.2]})
    for turn in range(60):
        kind, right = ("head-3", True) if turn % 2 else ("head-0", False)
        controller.judge(Draft((5,), kind), [5 if right else 6], verified=True)
    (sure,), (unsure,), (whole,) = (
        controller.odds[kind].chances([-1]) for kind in ("head-3", "head-0", "head")
    )
    assert sure > 0.9 and unsure < 0.1 and 0.4 < whole < 0.6


def test_a_new_kind_is_taken_to_be_as_good_as_its_drafter() -> None:
    """Look-ups have many kinds. If each were hoped for anew, bad ones would be tried for long."""
    controller = Controller({1: [1.0], 4: [1.2]})
    for _ in range(30):
        controller.judge(Draft((5, 6), "ngram-2"), [7], verified=False)
        controller.judge(Draft((5, 6), "head-2"), [5, 6, 7], verified=True)
    bad, good, unknown = (
        controller.odds[kind].chances([-1, 0]) for kind in ("ngram-4", "head-4", "suffix-4")
    )
    assert max(bad) < 0.1 and min(good) > 0.8
    assert unknown == pytest.approx([0.6, 0.36])


def test_a_prompt_that_a_drafter_has_not_read_is_a_loan() -> None:
    """Its time is no cost of a drafted token. A generation pays it back before it is asked again,
    and look-ups wait for nothing."""
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.take_times("head", DraftTimes(asking=0.0, token=0.1, reads=((100, 1.0),)))
    assert controller.reading_seconds("head", 200) == pytest.approx(2)
    for _ in range(10):
        controller.settle(0, 1, 1.0)
    assert controller.length("look-up", line(3)) == 3
    controller.spent += 2.0
    assert controller.length("head", line(3), "head", 200) == 0
    for _ in range(90):
        controller.settle(0, 1, 1.0)
    assert controller.length("head", line(3), "head", 200) == 3


def test_what_a_draft_is_known_to_cost_is_afforded_before_its_drafter_is_asked() -> None:
    """Its first draft would else be paid for, and not be verified."""
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.take_times("head", DraftTimes(asking=0.2, token=0.4, reads=((1, 0.1),)))
    assert controller.drafting_seconds("head", 1) == pytest.approx(0.6)
    assert controller.drafting_seconds("head", 3) == pytest.approx(1.4)
    assert controller.reading_seconds("head", 1) == 0
    assert controller.reading_seconds("head", 4) == pytest.approx(0.3)
    assert controller.length("look-up", line(3)) == 0
    controller.settle(0, 1, 1.0)
    assert controller.length("look-up", line(3)) == 3
    for _ in range(40):
        controller.settle(0, 1, 1.0)
    assert controller.length("head", line(3), "head") == 0, "it cannot pay"
    controller.take_times("head", DraftTimes(asking=0.2, token=0.1, reads=((1, 0.1),)))
    assert controller.length("head", line(3), "head") == 3
    for _ in range(9):
        controller.proposed("head", 2, 2, seconds=0.8, unread=1)  # twice what was known
    assert controller.drafting_seconds("head", 3) == pytest.approx(1.0)
    assert controller.reading_seconds("head", 4) == pytest.approx(0.6)


def test_drafts_that_end_early_cost_less() -> None:
    """Half of the later tokens are made, so a longer draft is worth asking for."""
    controller = Controller({1: [1.0], 4: [1.3]})
    controller.take_times("head", DraftTimes(asking=0.1, token=0.2))
    assert controller.drafting_seconds("head", 3) == pytest.approx(0.7)
    for _ in range(200):
        controller.proposed("head", 3, 2, seconds=0.5)
    assert controller.drafting_seconds("head", 1) == pytest.approx(0.3)
    assert controller.drafting_seconds("head", 3) == pytest.approx(0.5, abs=1e-4)


def test_steps_that_get_slower_with_the_text_make_no_call_dear() -> None:
    """Nearly all steps have a draft, so plain steps show the slower pace only seldom."""
    controller = Controller({1: [1.0] * 15, 4: [1.3] * 15})
    for number in range(60):
        controller.settle(3, 2, 1.3 * (1 + number / 100))
    assert controller.plain_step == pytest.approx(1.52)  # of the last 15
    for number in range(60, 90):
        pace = 1 + number / 100
        controller.settle(0, 1, pace)
        controller.settle(3, 2, 1.3 * pace)
    assert controller.calls[4].usual == pytest.approx(1.3)


def test_what_a_drafter_has_not_read_does_not_end_its_drafts() -> None:
    """It reads once for all later drafts; one call takes four tokens. Every plain step leaves one
    more unread."""
    controller = Controller({1: [1.0], 4: [1.1]})
    times = DraftTimes(asking=0.1, token=0.1, together=4, reads=((4, 0.2), (64, 1.0)))
    controller.take_times("head", times)
    seconds = [controller.reading_seconds("head", unread) for unread in (4, 5, 24, 25, 132)]
    assert seconds == pytest.approx([0, 0.2, 1.0, 1.0, 2.0])  # whole calls
    controller.spent, controller.plain = 250.0, 200.0  # others' drafts have lost much
    steps = 0
    while steps < 9999 and not controller.length("head", line(3), "head", steps):
        controller.settle(0, 1, 1.0)
        steps += 1
    assert steps < 4000


def test_a_call_that_got_dearer_is_found() -> None:
    """A longer text can make a call dearer, and plain steps not."""
    world = World({1: 1.0, 4: 1.3}, {"good": 0.9})
    controller = world.controller()
    world.generate(controller, 200, 3)
    world.times = {1: 1.0, 4: 6.0}
    world.generate(controller, 200, 3)
    assert controller.seconds(1) == 1.0 and controller.seconds(4) == pytest.approx(6.0)
    assert world.generate(controller, 200, 3) > 0.97


def test_an_answer_may_borrow_for_its_first_draft() -> None:
    """A draft of 2 plain steps: as much as the time so far, and two steps at most."""
    controller = Controller({1: [1.0], 4: [2.0]})
    waited = 0
    while not controller.length("good", line(3)):
        controller.settle(0, 1, 1.0)
        waited += 1
    assert waited == 1  # (1 + 2) * 0.97 <= 1 + 1 + 1
    controller.spent, controller.plain = 1000.0, 970.0 - 1 - 2 + 2 * 0.97
    assert controller.affordable(2.0, 3)
    controller.plain -= 0.01
    assert not controller.affordable(2.0, 3)


def test_a_busy_minute_makes_no_known_draft_dear() -> None:
    """It slows plain steps as much."""
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.take_times("head", DraftTimes(asking=0.2, token=0.4, reads=((1, 0.1),)))
    for _ in range(RECENT):
        controller.settle(0, 1, 3.0)
        controller.proposed("head", 1, 1, seconds=1.8, unread=1)
    assert controller.drafting_seconds("head", 1) == pytest.approx(1.8)
    for _ in range(RECENT):
        controller.settle(0, 1, 1.0)
    assert controller.drafting_seconds("head", 1) == pytest.approx(0.6)


def test_times_that_were_told_before_stay_those_of_their_plain_step() -> None:
    controller = Controller({1: [1.0], 4: [1.1]})
    for told, expected in ((0.2, 0.2), (0.2, 0.6), (0.3, 0.3)):
        controller.take_times("head", DraftTimes(asking=0.0, token=told))
        assert controller.drafting_seconds("head", 1) == pytest.approx(expected)
        for _ in range(RECENT):
            controller.settle(0, 1, 3.0)


def test_a_known_drafter_that_knows_nothing_is_no_error() -> None:
    """A follower that is as fast as a draft costs nothing beside its tokens."""
    controller = Controller({1: [1.0], 4: [1.1]})
    controller.take_times("head", DraftTimes(asking=0.0, token=0.4, reads=((1, 0.1),)))
    controller.proposed("head", 1, 0, seconds=0.0, unread=0)
    assert controller.drafting_seconds("head", 1) == pytest.approx(0.2), "of 0.4 and 0"


def test_one_slow_call_changes_nothing() -> None:
    controller = World({1: 1.0, 4: 1.1}, {}).controller()
    controller.settle(3, 1, 50.0)
    controller.settle(0, 1, 50.0)
    assert controller.seconds(1) == 1.0
    assert controller.seconds(4) == pytest.approx(1.1)


def test_other_work_that_slows_all_calls_does_not_end_drafting() -> None:
    """A busy minute slows plain steps and drafts alike; after it both are quick again."""
    world = World({1: 1.0, 4: 1.3}, {"good": 0.9})
    controller = world.controller()
    quick = world.generate(controller, 200, 3)
    world.times = {1: 4.0, 4: 5.2}
    world.generate(controller, 200, 3)
    world.times = {1: 1.0, 4: 1.3}
    for _ in range(5):  # plain steps find the new time; in seconds, calls would stay dear
        controller.settle(0, 1, 1.0)
    world.generate(controller, 40, 3)
    assert world.generate(controller, 200, 3) >= 0.95 * quick


def test_times_are_measured_up_to_what_drafts_need(tiny_engine) -> None:
    session = tiny_engine().session()
    assert measure_calls(session, 3).keys() == {1, 4}
    assert measure_calls(session, 5).keys() == {1, 4, 8}
    assert measure_calls(session, 50).keys() == {1, 4, 8}
    assert min(t for found in measure_calls(session, 8).values() for t in found) > 0
    assert session.position == 0


def test_each_number_of_tokens_has_a_cost_where_rows_cost(
    tiny_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tiny_engine().session()
    monkeypatch.setattr(session.execution.shards.backend, "by_rows", True)
    assert measure_calls(session, 3).keys() == {1, 2, 3, 4}
    assert measure_calls(session, 5).keys() == set(range(1, 9))
    monkeypatch.setattr("cetane.engine.session.MOST_COUNTS", 4)
    assert measure_calls(session, 5).keys() == {1, 4, 8}


def test_quick_calls_are_measured_more_often(tiny_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tiny_engine().session()
    for limit, count in ((1e9, RECENT), (0.0, LEAST)):
        monkeypatch.setattr("cetane.speculate.timing.MEASURING", limit)
        assert len(measure_calls(session, 1, least=20)[1]) == 20
        found = measure_calls(session, 3)
        assert {width: len(seconds) for width, seconds in found.items()} == {1: count, 4: count}
