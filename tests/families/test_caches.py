"""The contracts: their ports, and what they do to a cache, by hand in numpy."""

import numpy as np
import pytest
import torch

from cetane.families.axes import Axes
from cetane.families.caches import CACHES, CacheSpec
from cetane.families.pasts import HistorySpec, PastColumns
from cetane.schema.interface import (
    FromCache,
    FromHistory,
    Position,
    ToCache,
    ToHistory,
    WriteMask,
    hidden_shape,
)
from cetane.schema.slots import Slots

SHAPE = (2, 3, 4, 8)
STATE = (4, 3, 4, 8)
TOKENS, START = 3, 2


def spec(contract: str) -> CacheSpec:
    return CacheSpec("chunk-01", "kv", layers=2, heads=3, dim=4, slots=8, form=CACHES[contract])


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PAST = {part: random(*SHAPE, seed=seed) for seed, part in enumerate("kv")}
NEW = {part: random(2, 3, 4, TOKENS, seed=seed + 9) for seed, part in enumerate("kv")}


@pytest.mark.parametrize(
    ("contract", "inputs", "outputs", "states", "visible", "pads"),
    [
        ("readonly", {"kv_k": SHAPE, "kv_v": SHAPE}, (2, 3, 4, 5), 0, 13, True),
        ("blend", {"kv_k": SHAPE, "kv_v": SHAPE, "kv_write": (1, 1, 5, 8)}, SHAPE, 0, 8, True),
        ("shift", {"kv_k": SHAPE, "kv_v": SHAPE}, SHAPE, 0, 8, False),
        ("stateful", {"kv_position": (1,)}, None, 1, 8, True),
        ("stateful-blend", {"kv_write": (1, 1, 5, 8)}, None, 1, 8, True),
        ("stateful-shift", {}, None, 1, 8, False),
    ],
)
def test_ports(contract, inputs, outputs, states, visible, pads) -> None:
    cache, made = CACHES[contract], spec(contract)
    assert {item.name: item.shape for item in cache.inputs(made, 5)} == inputs
    expected = {} if outputs is None else {"kv_k_out": outputs, "kv_v_out": outputs}
    assert {item.name: item.shape for item in cache.outputs(made, 5)} == expected
    found = [(state.name, state.shape, state.dtype) for state in cache.states(made)]
    assert found == [("kv_kv", STATE, "fp16")][:states]
    slots = Slots(contract=contract, count=8)
    assert slots.visible(5) == visible
    assert slots.pads(5) == pads


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift"])
def test_caches_that_the_host_carries_are_named_by_shard(contract: str) -> None:
    cache = CACHES[contract]
    names = ["chunk-01.kv_k", "chunk-01.kv_v"]
    made = spec(contract)
    read = [i.source for i in cache.inputs(made, 5) if isinstance(i.source, FromCache)]
    write = "append" if contract == "readonly" else "replace"
    assert read == [FromCache(name=n, group="kv") for n in names]
    expected = [ToCache(name=n, group="kv", write=write) for n in names]
    assert [o.sink for o in cache.outputs(made, 5)] == expected


def test_the_host_says_where_to_write() -> None:
    blend, stateful = (CACHES[c].inputs(spec(c), 5) for c in ("blend", "stateful"))
    assert blend[-1].source == WriteMask(group="kv")
    assert (stateful[0].source, stateful[0].dtype) == (Position(group="kv"), "int32")


def run(contract: str, **extra: torch.Tensor):
    """Extend both layers by NEW: what each may attend to, the results, and the tensors after."""
    tensors = {f"kv_{part}": torch.tensor(past) for part, past in PAST.items()} | extra
    if contract.startswith("stateful"):  # of every layer its keys, then its values
        rows = [PAST[part][layer] for layer in range(2) for part in "kv"]
        tensors["kv_kv"] = torch.tensor(np.stack(rows))
    cache = CACHES[contract](spec(contract), tensors)
    seen = [
        cache.extend(*(torch.tensor(NEW[part][layer : layer + 1]) for part in "kv"))
        for layer in range(2)
    ]
    keys, values = (torch.cat(parts).numpy() for parts in zip(*seen, strict=True))
    results = {name: tensor.numpy() for name, tensor in cache.results().items()}
    return {"k": keys, "v": values}, results, tensors


def updated(part: str) -> np.ndarray:
    after = PAST[part].copy()
    after[..., START : START + TOKENS] = NEW[part]
    return after


@pytest.mark.parametrize("part", ["k", "v"])
class TestSemantics:
    def test_readonly(self, part: str) -> None:
        seen, results, tensors = run("readonly")
        assert np.array_equal(seen[part], np.concatenate([PAST[part], NEW[part]], axis=-1))
        assert np.array_equal(results[f"kv_{part}_out"], NEW[part])
        assert np.array_equal(tensors[f"kv_{part}"], PAST[part])

    def test_blend(self, part: str) -> None:
        write = torch.zeros(1, 1, TOKENS, 8)
        write[0, 0, range(TOKENS), range(START, START + TOKENS)] = 1
        seen, results, tensors = run("blend", kv_write=write)
        assert np.array_equal(seen[part], updated(part))
        assert np.array_equal(results[f"kv_{part}_out"], updated(part))
        assert np.array_equal(tensors[f"kv_{part}"], PAST[part])

    def test_blend_leaves_out_what_has_no_slot(self, part: str) -> None:
        write = torch.zeros(1, 1, TOKENS, 8)
        write[0, 0, 0, 5] = 1  # two columns of padding
        seen, _, _ = run("blend", kv_write=write)
        expected = PAST[part].copy()
        expected[..., 5] = NEW[part][..., 0]
        assert np.array_equal(seen[part], expected)

    def test_shift(self, part: str) -> None:
        expected = np.concatenate([PAST[part][..., TOKENS:], NEW[part]], axis=-1)
        seen, results, _ = run("shift")
        assert np.array_equal(seen[part], expected)
        assert np.array_equal(results[f"kv_{part}_out"], expected)

    def test_stateful(self, part: str) -> None:
        seen, results, tensors = run("stateful", kv_position=torch.tensor([START]))
        assert np.array_equal(seen[part], updated(part))
        assert np.array_equal(tensors["kv_kv"]["kv".index(part) :: 2], updated(part))
        assert results == {}

    def test_a_state_that_a_mask_writes(self, part: str) -> None:
        write = torch.zeros(1, 1, TOKENS, 8)
        write[0, 0, range(TOKENS), range(START, START + TOKENS)] = 1
        seen, results, tensors = run("stateful-blend", kv_write=write)
        assert np.array_equal(seen[part], updated(part))
        assert np.array_equal(tensors["kv_kv"]["kv".index(part) :: 2], updated(part))
        assert results == {}

    def test_a_state_that_shifts(self, part: str) -> None:
        expected = np.concatenate([PAST[part][..., TOKENS:], NEW[part]], axis=-1)
        seen, results, tensors = run("stateful-shift")
        assert np.array_equal(seen[part], expected)
        assert np.array_equal(tensors["kv_kv"]["kv".index(part) :: 2], expected)
        assert results == {}


@pytest.mark.parametrize(
    ("order", "past", "new"),
    [("c1t", (2, 6, 1, 3), (2, 6, 1, 5)), ("ct1", (2, 6, 3, 1), (2, 6, 5, 1))],
)
def test_ports_of_a_history(order: str, past: tuple[int, ...], new: tuple[int, ...]) -> None:
    spec = HistorySpec("chunk-01", "conv", layers=2, channels=6, length=3, axes=Axes(order))
    taken, given = spec.input(), spec.output(5)
    assert (taken.name, taken.shape) == ("conv", past)
    assert taken.source == FromHistory(name="chunk-01.conv")
    assert (given.name, given.shape) == ("conv_out", new)
    assert given.sink == ToHistory(name="chunk-01.conv")


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_history_shows_the_past_and_gives_back_the_new(order: str) -> None:
    """Of each layer its own, in the order in which they ask; it writes nothing itself."""
    spec = HistorySpec("chunk-01", "conv", layers=2, channels=6, length=3, axes=Axes(order))
    past, new = random(2, 6, 3, seed=1), random(2, 6, 4, seed=2)
    given = torch.tensor(past).reshape(spec.input().shape)
    history = PastColumns(spec, {"conv": given})
    for layer in range(2):
        seen = history.extend(torch.tensor(new[layer]).reshape(hidden_shape(order, 6, 4)))
        assert seen.shape == hidden_shape(order, 6, 7)
        assert np.array_equal(
            seen.reshape(6, 7).numpy(), np.concatenate([past[layer], new[layer]], axis=1)
        )
    (out,) = history.results().values()
    assert list(history.results()) == ["conv_out"]
    assert out.shape == spec.output(4).shape
    assert np.array_equal(out.reshape(new.shape).numpy(), new)
    assert np.array_equal(given.reshape(past.shape).numpy(), past)
