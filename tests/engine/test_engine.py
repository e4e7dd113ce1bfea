"""Sessions: which function runs, what is refused, and what padding must not leave behind."""

from typing import Any

import numpy as np
import pytest
import torch

from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.families.caches import CONTRACTS
from cetane.families.flow import ToCache

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
    session = tiny_engine(contract).session()
    session.position = position
    assert session.choose(tokens) == mode


def only(engine: Engine, *modes: str) -> Engine:
    return Engine(engine.plan, engine.backend, engine.tables, modes)


def test_choose_among_some_of_the_modes(tiny_engine) -> None:
    session = only(tiny_engine(), "decode", "prefill").session()
    assert [session.choose(n) for n in (1, 2, 4, 9)] == ["decode"] + ["prefill"] * 3


@pytest.mark.parametrize(("contract", "fed", "more"), [("shift", 0, 3), ("readonly", 26, 3)])
def test_no_function_takes_them(tiny_engine, contract: str, fed: int, more: int) -> None:
    session = only(tiny_engine(contract), "prefill").session()
    session.position = fed
    with pytest.raises(CetaneError, match=r"no function takes 3 tokens; widths: \[8\]"):
        session.feed(IDS[:more])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([3, 288], "token 288 is not in the vocabulary of 288"),
        ([3, -1, 5], "token -1 is not in the vocabulary of 288"),
        ([2**40], "token 1099511627776 is not"),
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
        held = sorted(session.slots[session.slots >= 0])
        assert held == list(range(fed))


@pytest.mark.parametrize("contract", ["readonly", "blend"])
def test_padded_columns_stay_out_of_the_cache(tiny_engine, contract: str) -> None:
    session = tiny_engine(contract).session()
    session.feed(IDS[:5])  # in a call of 8
    for name, cache in session.caches.items():
        assert np.abs(cache[..., :5]).min() > 0, name
        assert not cache[..., 5:].any(), name
    assert session.slots.tolist() == [0, 1, 2, 3, 4] + [-1] * 27


def test_shift_keeps_the_newest_on_the_right(tiny_engine) -> None:
    session = tiny_engine("shift").session()
    session.feed(IDS[:5])
    assert session.slots.tolist() == [-1] * 27 + [0, 1, 2, 3, 4]
    for name, cache in session.caches.items():
        assert np.abs(cache[..., 27:]).min() > 0, name
        assert not cache[..., :27].any(), name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_caches_have_the_shapes_of_the_plan(tiny_engine, contract: str) -> None:
    session = tiny_engine(contract).session()
    shapes = {} if contract == "stateful" else {
        f"chunk-0{i}.kv_{part}": (1, 2, 16, CONTEXT) for i in range(2) for part in "kv"
    }  # fmt: skip
    assert {name: cache.shape for name, cache in session.caches.items()} == shapes
    session.feed(IDS[:6])
    assert {name: cache.shape for name, cache in session.caches.items()} == shapes


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
    session = tiny_engine().session()
    session.watch = lambda shard, name, value, valid: seen.setdefault(name, []).append(valid)
    session.feed(IDS[:13], wanted)
    assert seen.get("logits_0", []) == seen.get("logits_1", []) == calls
    assert seen["kv_k_out"] == [8, 8, 5, 5]  # two chunks, two calls


def test_watch_sees_every_output_as_it_is(tiny_engine, truth) -> None:
    seen: dict[tuple[str, str], tuple[np.ndarray, int]] = {}
    engine = tiny_engine()
    session = engine.session()
    session.watch = lambda *output: seen.update({output[:2]: output[2:]})
    session.feed(IDS[:3], "all")
    planned = {
        (shard.name, item.name): item.shape
        for shard in engine.plan.shards
        for function in shard.functions
        if function.name == "verify"
        for item in function.outputs
    }
    assert {key: value.shape for key, (value, _) in seen.items()} == planned
    assert {valid for _, valid in seen.values()} == {3}
    assert close(seen["head-1", "logits_1"][0][0, :, 0, :3].T, truth[:3, 128:])


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
    for shard in tiny_engine().plan.shards:
        for function in shard.functions:
            for item in function.outputs:
                assert not isinstance(item.sink, ToCache) or item.sink.write == "append"
