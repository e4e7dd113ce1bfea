"""Sessions: which function runs, what is refused, and what padding must not leave behind."""

from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.families.parity import tokens
from tests.families.parity import truth as zaya_truth
from tests.families.zaya_models import scores

from cetane.engine.call import Running
from cetane.engine.engine import Engine
from cetane.engine.schedule import Schedule
from cetane.engine.session import Session, gather
from cetane.errors import CetaneError
from cetane.schema.function import Route
from cetane.schema.interface import ToCache
from cetane.schema.slots import CONTRACTS

CONTEXT = 32
IDS = np.random.default_rng(1).integers(0, 288, CONTEXT).tolist()


@pytest.fixture(scope="module")
def truth(model: Any) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0].numpy()


def close(logits: np.ndarray, expected: np.ndarray) -> bool:
    return logits.shape == expected.shape and float(np.abs(logits - expected).max()) <= 1e-4


@pytest.mark.parametrize(
    ("contract", "position", "tokens", "mode"),
    [
        ("readonly", 0, 1, "decode"),
        ("readonly", 0, 2, "verify"),
        ("readonly", 0, 4, "verify"),
        ("readonly", 0, 5, "prefill"),
        ("readonly", 0, 8, "prefill"),
        ("readonly", 0, 9, "prefill"),
        ("readonly", 0, 32, "prefill"),
        ("blend", 0, 3, "verify"),
        ("stateful", 0, 3, "verify"),
        # not wider than what is left of the context: padding would not fit
        ("readonly", 28, 3, "verify"),
        ("readonly", 29, 3, "decode"),
        ("stateful", 25, 5, "verify"),
        ("readonly", 24, 5, "prefill"),
        ("readonly", 31, 1, "decode"),
        # what shifts cannot be padded
        ("shift", 0, 1, "decode"),
        ("shift", 0, 3, "decode"),
        ("shift", 0, 4, "verify"),
        ("shift", 0, 7, "verify"),
        ("shift", 0, 8, "prefill"),
        ("shift", 0, 11, "prefill"),
    ],
)
def test_choose(tiny_engine, contract: str, position: int, tokens: int, mode: str) -> None:
    schedule = Schedule(tiny_engine(contract).plan)
    assert schedule.choose(position, tokens) == mode


def test_choose_among_some_of_the_modes(tiny_engine) -> None:
    schedule = Schedule(tiny_engine().plan, ["decode", "prefill"])
    assert [schedule.choose(0, n) for n in (1, 2, 4, 9)] == ["decode"] + ["prefill"] * 3


@pytest.mark.parametrize(("contract", "fed", "more"), [("shift", 0, 3), ("readonly", 26, 3)])
def test_no_function_takes_them(tiny_engine, contract: str, fed: int, more: int) -> None:
    session = tiny_engine(contract).session(["prefill"])
    session.memory.position = fed
    with pytest.raises(CetaneError, match=r"no function takes 3 tokens; widths: \[8\]"):
        session.feed(IDS[:more])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([3, 288], "token 288 is not in the vocabulary of 288"),
        ([3, -1, 5], "token -1 is not in the vocabulary of 288"),
        ([2**40], "token 1099511627776 is not"),
        ([3, 1.5], "a token is not a whole number"),
        ("text", "a token is not a whole number"),
        ([[3, 4]], "a token is not a whole number"),
        ([1] * 28, "28 tokens after 5 do not fit a context of 32"),
    ],
)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_what_is_refused_changes_nothing(tiny_engine, truth, contract, tokens, message) -> None:
    session = tiny_engine(contract).session()
    session.feed(IDS[:5])
    with pytest.raises(CetaneError, match=message):
        session.feed(tokens)
    assert session.position == 5
    assert close(session.feed(IDS[5:9], "all"), truth[5:9])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_context_can_be_filled_and_no_more(tiny_engine, truth, contract: str) -> None:
    session = tiny_engine(contract).session()
    assert close(session.feed(IDS), truth[-1])
    assert session.position == CONTEXT
    with pytest.raises(CetaneError, match="1 tokens after 32 do not fit") as error:
        session.feed([1])
    assert error.value.hint


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("pieces", [[3, 29], [1, 6, 25], [2, 2, 2, 26], [5, 3, 5, 19], [7, 24, 1]])
def test_padding_leaves_nothing_behind(tiny_engine, truth, contract, pieces: list[int]) -> None:
    session = tiny_engine(contract).session()
    fed = 0
    for piece in pieces:
        assert close(session.feed(IDS[fed : fed + piece], "all"), truth[fed : fed + piece])
        fed += piece
        slots = session.memory.slots["kv"]
        held = sorted(slots[slots >= 0])
        assert held == list(range(fed))


@pytest.mark.parametrize("contract", ["readonly", "blend"])
def test_padded_columns_stay_out_of_the_cache(tiny_engine, contract: str) -> None:
    session = tiny_engine(contract).session()
    session.feed(IDS[:5])  # in a call of 8
    for name, cache in session.memory.caches.items():
        assert np.abs(cache[..., :5]).min() > 0, name
        assert not cache[..., 5:].any(), name
    assert session.memory.slots["kv"].tolist() == [0, 1, 2, 3, 4] + [-1] * 27


def test_shift_keeps_the_newest_on_the_right(tiny_engine) -> None:
    session = tiny_engine("shift").session()
    session.feed(IDS[:5])
    assert session.memory.slots["kv"].tolist() == [-1] * 27 + [0, 1, 2, 3, 4]
    for name, cache in session.memory.caches.items():
        assert np.abs(cache[..., 27:]).min() > 0, name
        assert not cache[..., :27].any(), name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_caches_have_the_shapes_of_the_plan(tiny_engine, contract: str) -> None:
    session = tiny_engine(contract).session()
    shapes = {} if contract == "stateful" else {
        f"chunk-0{i}.kv_{part}": (1, 2, 16, CONTEXT) for i in range(2) for part in "kv"
    }  # fmt: skip
    assert {name: cache.shape for name, cache in session.memory.caches.items()} == shapes
    session.feed(IDS[:6])
    assert {name: cache.shape for name, cache in session.memory.caches.items()} == shapes


@pytest.mark.parametrize("contract", CONTRACTS)
def test_sessions_do_not_share_anything(tiny_engine, truth, contract: str) -> None:
    engine = tiny_engine(contract)
    one, other = engine.session(), engine.session()
    one.feed(IDS[:6])
    other.feed(IDS[:6][::-1])
    one.feed(IDS[6:9])
    other.feed([7])
    assert close(one.feed(IDS[9:12], "all"), truth[9:12])


@pytest.mark.parametrize("kind", ["single", "chunks"])
def test_wanted(tiny_engine, truth, kind: str) -> None:
    engine = tiny_engine(layout={"kind": kind})
    everything = engine.session().feed(IDS[:13], "all")
    last = engine.session().feed(IDS[:13], "last")
    assert everything.dtype == last.dtype == np.float32
    assert close(everything, truth[:13])
    assert close(last, truth[12])
    session = engine.session()
    assert session.feed(IDS[:13], "none") is None
    assert session.position == 13
    assert close(session.feed(IDS[13:14]), truth[13])


@pytest.mark.parametrize(
    ("wanted", "calls"),
    [("none", []), ("last", [5]), ("all", [8, 5])],
)
def test_heads_run_only_for_logits_that_are_wanted(tiny_engine, wanted, calls) -> None:
    seen: dict[str, list[int]] = {}

    def watch(step: Any, name: str, value: np.ndarray, valid: int) -> None:
        if not name.startswith("kv"):
            seen.setdefault(step.shard, []).append(valid)

    tiny_engine().session(watch=[watch]).feed(IDS[:13], wanted)
    assert seen.get("head-0", []) == seen.get("head-1", []) == calls
    assert seen["chunk-00"] == [8, 5]  # what the last layer hands on nobody reads without a head


def test_watch_sees_every_output_as_it_is(tiny_engine, truth) -> None:
    seen: dict[tuple[str, str], tuple[np.ndarray, int]] = {}
    engine = tiny_engine()
    engine.session(
        watch=[lambda step, name, *output: seen.update({(step.shard, name): output})]
    ).feed(IDS[:3], "all")
    planned = {
        (shard.name, item.name): item.shape
        for shard in engine.plan.shards
        for function in shard.functions
        if function.name == "verify"
        for item in function.outputs
    }
    assert {key: value.shape for key, (value, _) in seen.items()} == planned
    assert {valid for _, valid in seen.values()} == {3}
    assert close(seen["head-1", "logits_0"][0][0, :, 0, :3].T, truth[:3, 128:])


def test_shards_open_once_and_on_first_use(tiny_engine) -> None:
    engine = tiny_engine()
    opened = []
    open_shard = engine.backend.open
    engine.backend.open = lambda shard: opened.append(shard) or open_shard(shard)
    session = engine.session()
    assert opened == []
    session.feed(IDS[:9], "none")
    assert opened == ["chunk-00", "chunk-01"]
    session.feed(IDS[9:10])
    engine.session().feed(IDS[:3])
    assert opened == ["chunk-00", "chunk-01", "head-0", "head-1"]


def test_time_is_accounted_by_shard(tiny_engine) -> None:
    engine = tiny_engine()
    engine.session().feed(IDS[:3])
    assert engine.seconds.keys() == {"load", "host", "chunk-00", "chunk-01", "head-0", "head-1"}
    assert min(engine.seconds.values()) > 0


def test_a_readonly_graph_writes_no_cache_itself(tiny_engine) -> None:
    functions = tiny_engine().plan.functions.values()
    sinks = [item.sink for function in functions for item in function.outputs]
    assert {sink.write for sink in sinks if isinstance(sink, ToCache)} == {"append"}


def feed(engine: Engine, *pieces: int, wanted: str = "last") -> Session:
    session, fed = engine.session(), 0
    for piece in pieces:
        session.feed(tokens(engine.plan.vocab)[fed : fed + piece], wanted)
        fed += piece
    return session


def experts(engine: Engine) -> dict[str, list[tuple[str, Any, Any]]]:
    """Calls of experts by shard: function, inputs and outputs."""
    found: dict[str, list[tuple[str, Any, Any]]] = {}
    for shard, function, inputs, outputs in engine.backend.calls:
        if function.startswith("expert"):
            found.setdefault(shard, []).append((function, inputs, outputs))
    return found


ROUTES = ["decode", "verify"]


@pytest.mark.parametrize("order", ["c1t", "ct1"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_one_call_for_the_tokens_of_an_expert(zaya, zaya_engine, order: str, count: int) -> None:
    """As many calls as experts are chosen, each in the narrowest function that takes its tokens.
    Padded tokens, of which there may be some, are in none."""
    engine = zaya_engine(routed=ROUTES, order=order)
    feed(engine, count)
    choices, found = scores(zaya).argmax(-1)[:, :count].numpy(), experts(engine)
    assert list(found) == [f"moe-{layer:02}" for layer in range(len(choices))]
    for layer, calls in enumerate(found.values()):
        chosen, tokens = np.unique(choices[layer], return_counts=True)
        assert [function for function, _, _ in calls] == [
            f"expert-{expert:02}-{'decode' if n == 1 else 'verify'}"
            for expert, n in zip(chosen, tokens, strict=True)
        ]
        for (_, inputs, _), n in zip(calls, tokens, strict=True):
            hidden = inputs["hidden"].reshape(32, -1)
            assert hidden.shape[1] == (1 if n == 1 else 4)
            assert hidden[:, :n].any(0).all()
            assert not hidden[:, n:].any()


def routed(engine: Engine, choices: list[int], width: int) -> tuple[list[str], Any]:
    """Calls of the first layer's experts for tokens with these choices, of a call of `width`, and
    the hidden state after it."""
    route = next(s for s in engine.plan.modes["verify"].steps if isinstance(s, Route))
    session = engine.session()
    running = Running(session.memory.place(np.arange(len(choices)), width), {})
    rows = np.zeros((5, width), np.float32)
    rows[choices, range(len(choices))] = 1
    rows[0, len(choices) :] = 9  # what padded tokens would choose
    hidden = np.random.default_rng(0).standard_normal((1, 32, 1, width)).astype(np.float32)
    running.tensors = {"scores": rows.reshape(1, 5, 1, width), "hidden": hidden,
                       "probabilities": np.full((1, 5, 1, width), 0.5, np.float32)}  # fmt: skip
    engine.backend.calls.clear()
    session.execution.step(route, running)
    return engine.backend.functions(), running.tensors["hidden"]


@pytest.mark.parametrize(
    ("choices", "width", "calls"),
    [
        ([2, 1, 2, 1], 4, ["expert-01-verify", "expert-02-verify"]),
        ([2, 1, 2, 2], 4, ["expert-01-decode", "expert-02-verify"]),
        ([3, 3, 3, 3], 4, ["expert-03-verify"]),
        ([3, 0, 1, 2], 4, [f"expert-0{i}-decode" for i in range(4)]),
        ([4, 4, 1], 4, ["expert-01-decode", "expert-04-verify"]),
        ([4], 4, ["expert-04-decode"]),
        # more than a function takes: full ones, and one for the rest
        ([1] * 5, 8, ["expert-01-verify", "expert-01-decode"]),
        ([1, 2, 1, 1, 2, 1, 1, 1], 8, ["expert-01-verify", "expert-01-verify", "expert-02-verify"]),
        ([1] * 8, 8, ["expert-01-verify"] * 2),
    ],
    ids=str,
)
def test_how_tokens_are_grouped(zaya_engine, choices, width: int, calls: list[str]) -> None:
    engine = zaya_engine(routed=ROUTES)
    found, together = routed(engine, choices, width)
    assert found == calls
    assert together.shape == (1, 32, 1, width)
    for index, choice in enumerate(choices):  # as each token would have been alone
        alone = np.zeros((1, 32, 1, 1), np.float32)
        hidden = np.random.default_rng(0).standard_normal((1, 32, 1, width)).astype(np.float32)
        alone[..., 0] = hidden[..., index]
        inputs = {"hidden": alone, "probabilities": np.full((1, 5, 1, 1), 0.5, np.float32)}
        name = f"expert-{choice:02}-decode"
        wanted = {i.name for i in engine.plan.functions["moe-00", name].inputs}
        inputs = {key: value for key, value in inputs.items() if key in wanted}
        expected = engine.open("moe-00").call(name, inputs, None)["hidden_out"]
        assert np.abs(together[..., index] - expected[..., 0]).max() <= 1e-5
    assert not together[..., len(choices) :].any()


def test_a_step_of_a_route_takes_the_time_of_all_its_experts(zaya_engine, monkeypatch) -> None:
    """By a clock that counts its own calls: each call of an expert takes a second."""
    clock = SimpleNamespace(perf_counter=count().__next__)
    monkeypatch.setattr("cetane.engine.shards.time", clock)
    engine = zaya_engine(routed=ROUTES)
    route = next(s for s in engine.plan.modes["verify"].steps if isinstance(s, Route))
    for choices, width in (([2, 1, 3, 1], 4), ([2], 1), ([1], 1), ([4, 4], 4)):
        routed(engine, choices, width)
    assert list(engine.shards.latest(route, 4)) == [3, 1]
    assert list(engine.shards.latest(route, 1)) == [1, 1]
    assert list(engine.shards.latest(route, 8)) == []


@pytest.mark.parametrize("kind", ["per-block", "single"])
def test_experts_that_are_not_chosen_are_not_called(zaya, zaya_engine, kind: str) -> None:
    engine = zaya_engine(kind=kind, routed=[*ROUTES, "prefill"])
    feed(engine, 8, *[1] * 5)
    called = sum(map(len, experts(engine).values()))
    choices = scores(zaya).argmax(-1).numpy()
    assert called == sum(len(set(row[:8])) + 5 for row in choices)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
@pytest.mark.parametrize("pieces", [[1], [3], [1, 1], [5, 1], [8, 3, 2], [13]])
def test_histories_hold_the_newest_valid_tokens(zaya_engine, order: str, pieces: list[int]) -> None:
    """Of a padded call nothing but its tokens, and zeros before the first one."""
    session = feed(zaya_engine(order=order), *pieces)
    count = sum(pieces)
    steps = feed(zaya_engine(order=order), *[1] * count)
    lengths = {"conv": 2, "delayed": 1}
    assert session.memory.histories.keys() == {
        f"attn-0{layer}.{name}" for layer in range(3) for name in lengths
    }
    for name, history in session.memory.histories.items():
        length = lengths[name.partition(".")[2]]
        assert history.shape[3 if order == "c1t" else 2] == length
        rows = history.reshape(-1, length)
        assert not rows[:, : max(0, length - count)].any()
        assert np.abs(rows[:, max(0, length - count) :]).min() > 0
        assert np.abs(history - steps.memory.histories[name]).max() <= 1e-5


def test_a_history_by_hand(zaya_engine) -> None:
    engine = zaya_engine(verify=4)
    feed(engine, 3, 1)
    outputs = [o["conv_out"] for s, _, _, o in engine.backend.calls if s == "attn-00"]
    inputs = [i["conv"] for s, _, i, _ in engine.backend.calls if s == "attn-00"]
    assert [value.shape[-1] for value in outputs] == [4, 1]
    assert not inputs[0].any()
    assert np.array_equal(inputs[1], outputs[0][..., 1:3])  # its last column is padding


def test_one_shard_at_a_time(zaya_engine) -> None:
    """A shard is opened once a feed, takes all of its calls, and is gone before the next."""
    engine = zaya_engine(resident=False)
    order = [shard.name for shard in engine.plan.shards]
    session = engine.session()
    session.feed(tokens(101)[:13], "all")
    assert engine.backend.opened == order
    assert engine.backend.most_live == 1
    shards = [shard for shard, *_ in engine.backend.calls]
    assert shards == sorted(shards, key=order.index)
    assert shards.count("attn-00") == 2
    session.feed(tokens(101)[13:14], "none")
    assert engine.backend.opened == [*order, *order[:-1]]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("routed", [[], ["decode", "verify"]], ids=str)
def test_one_shard_at_a_time_gives_the_same(zaya, zaya_engine, contract, routed) -> None:
    engine = zaya_engine(contract, resident=False, kind="per-layer", routed=routed)
    session = engine.session()
    found = [session.feed(tokens(101)[a:b], "all") for a, b in ((0, 9), (9, 10), (10, 14))]
    assert close(np.concatenate(found), zaya_truth(zaya)[:14])


def test_a_sequence_may_begin_anywhere(tiny_engine, truth) -> None:
    """Rotary positions are relative: without a past, logits do not depend on where it begins."""
    session = tiny_engine().session(start=9)
    assert close(session.feed(IDS[:6], "all"), truth[:6])
    assert session.position == 15
    assert sorted(slot for slot in session.memory.slots["kv"] if slot >= 0) == list(range(9, 15))


def test_calls_may_be_of_some_modes_only(tiny_engine, truth) -> None:
    engine = tiny_engine()
    session = engine.session()
    calls = [
        *session.prepare(IDS[:8], "all", ["decode"]),
        *session.prepare(IDS[8:12], "all", ["verify", "decode"]),
    ]
    assert [call.call.width for call in calls] == [1] * 8 + [4]
    engine.run([(session, calls)])
    assert close(gather(calls, "all"), truth[:12])


def test_some_shards_only(zaya_engine) -> None:
    """Calls may be taken through the model in several runs."""
    engine = zaya_engine()
    session = engine.session()
    calls = session.prepare(tokens(101)[:9], "all")
    order = [shard.name for shard in engine.plan.shards]
    for shard in order[:3]:
        engine.run([(session, calls)], [shard])
        assert engine.backend.opened[-1] == shard
    engine.run([(session, calls)], order[3:])
    assert engine.backend.opened == order
    assert np.array_equal(gather(calls, "all"), engine.session().feed(tokens(101)[:9], "all"))


def test_sessions_share_an_opened_shard(zaya, zaya_engine) -> None:
    engine = zaya_engine(resident=False)
    one, other = engine.session(), engine.session()
    ids = tokens(101)
    work = [(s, s.prepare(i, "all")) for s, i in ((one, ids[:9]), (other, ids[:3]))]
    engine.run(work)
    assert engine.backend.opened == [shard.name for shard in engine.plan.shards]
    truth = zaya_truth(zaya)
    assert close(gather(work[0][1], "all"), truth[:9])
    assert close(gather(work[1][1], "all"), truth[:3])


@pytest.mark.parametrize(
    ("contract", "fed", "more"),
    [("shift", 8, 9), ("readonly", 3, 29), ("blend", 3, 29), ("stateful", 3, 29)],
)
def test_what_cannot_be_scheduled_changes_nothing(
    zaya, zaya_engine, contract: str, fed: int, more: int
) -> None:
    """Not even the part for which there are calls of 8: the last tokens can have no padding."""
    engine = zaya_engine(contract)
    session = engine.session(["prefill"])
    session.feed(tokens(101)[:fed], "none")
    before = (
        session.position,
        session.memory.slots,
        dict(session.memory.caches),
        dict(session.memory.histories),
    )
    slots = session.memory.slots["kv"].copy()
    engine.backend.calls.clear()
    with pytest.raises(CetaneError, match=r"no function takes [15] tokens; widths: \[8\]"):
        session.feed(tokens(101)[fed : fed + more])
    assert engine.backend.calls == []
    assert session.position == before[0]
    assert session.memory.slots is before[1]
    assert np.array_equal(session.memory.slots["kv"], slots)
    assert all(session.memory.caches[name] is cache for name, cache in before[2].items())
    assert all(session.memory.histories[name] is history for name, history in before[3].items())
    found = session.feed(tokens(101)[fed : fed + 8], "all")
    assert close(found, zaya_truth(zaya)[fed : fed + 8])


def test_a_session_that_failed_is_over(tiny_engine) -> None:
    """What its shards had remembered when one of them failed is of no use."""
    engine = tiny_engine()
    session = engine.session()
    session.feed([1, 2, 3])
    shard = engine.open("head-0")
    call = shard.call

    def fail(*arguments: Any) -> Any:
        raise CetaneError("head-0 is damaged")

    shard.call = fail
    with pytest.raises(CetaneError, match="is damaged"):
        session.feed([4])
    shard.call = call
    with pytest.raises(CetaneError, match="a call of this session failed"):
        session.feed([4])
    with pytest.raises(CetaneError, match="a call of this session failed"):
        engine.session().take(session)
    assert engine.session().feed([1, 2, 3, 4]) is not None


def test_a_failing_call_names_its_shard(tiny_engine) -> None:
    """A bundle has dozens of them. A message that has the name already stays as it is."""
    engine = tiny_engine()
    shard = engine.open("head-0")
    for message, told in (
        ("function decode, pow op_1: overflow", "head-0: function decode, pow op_1: overflow"),
        ("b/head-0.mlpackage is damaged", "b/head-0.mlpackage is damaged"),
    ):
        shard.call = Mock(side_effect=CetaneError(message, "port again"))
        with pytest.raises(CetaneError) as refusal:
            engine.session().feed([1])
        assert (refusal.value.message, refusal.value.hint) == (told, "port again")


def test_a_program_that_is_not_its_plan(tiny_engine) -> None:
    engine = tiny_engine()
    program = engine.open("head-0")
    call = program.call
    program.call = lambda *arguments: {"other": call(*arguments)["logits_0"]}
    with pytest.raises(CetaneError, match="does not give the logits_0 of its plan"):
        engine.session().feed([1])
    program.call = lambda *arguments: {"logits_0": call(*arguments)["logits_0"][:, 1:]}
    with pytest.raises(CetaneError, match="does not give the logits_0 of its plan"):
        engine.session().feed([1])
