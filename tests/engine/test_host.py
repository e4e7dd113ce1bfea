"""What the host supplies to a call, by hand."""

from typing import Any

import numpy as np
import pytest

from cetane.bundle.tables import Tables
from cetane.engine.call import Call
from cetane.engine.host import host_input
from cetane.engine.memory import runs
from cetane.engine.slots import CallSlots, slots_after
from cetane.schema.interface import (
    MASKED,
    Embedding,
    Input,
    Mask,
    Position,
    Rotary,
    Source,
    WriteMask,
)
from cetane.schema.slots import Slots

EMBEDDING = np.arange(30, dtype=np.float16).reshape(10, 3)  # 10 tokens, 3 channels
ROTARY = np.arange(80, dtype=np.float32).reshape(2, 10, 4)  # cos and sin, 10 positions, 4 wide
TABLES = Tables(EMBEDDING, {"default": ROTARY, "local": -ROTARY})


def call(order: str = "c1t", width: int = 3, **changes: Any) -> Call:
    """Tokens 7 and 2 at positions 4 and 5, in a call that is 3 wide, over 8 slots."""
    fields: dict[str, Any] = {
        "tokens": np.array([7, 2]),
        "positions": np.array([4, 5]),
        "width": width,
        "order": order,
    }
    held = np.array([0, 1, 2, 3, 4, 5, -1, -1])
    placed = {"after": held, "keys": held, "targets": np.array([4, 5]), "own": np.array([4, 5])}
    fields["groups"] = {"kv": CallSlots(**placed | changes)}
    return Call(**fields)


def host(source: Source, at: Call, dtype: type = np.float32) -> np.ndarray:
    return host_input(Input(name="x", shape=(), source=source), at, TABLES, dtype)


def rows(mask: np.ndarray) -> list[str]:
    """Mask rows as text: `x` where a key is seen."""
    assert set(np.unique(mask)) <= {0.0, MASKED}
    return ["".join("x" if value == 0 else "." for value in row) for row in mask[0, 0]]


@pytest.mark.parametrize(("order", "shape"), [("c1t", (1, 3, 1, 3)), ("ct1", (1, 3, 3, 1))])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_embedding(order: str, shape: tuple[int, ...], dtype: type) -> None:
    x = host(Embedding(), call(order), dtype)
    assert (x.shape, x.dtype) == (shape, dtype)
    # columns: token 7, token 2, padding
    assert x.reshape(3, 3).tolist() == [[21, 6, 0], [22, 7, 0], [23, 8, 0]]


@pytest.mark.parametrize("table", ["default", "local"])
@pytest.mark.parametrize(("part", "first"), [("cos", 0), ("sin", 40)])
def test_rotary(table: str, part: str, first: int) -> None:
    x = host(Rotary(table=table, part=part), call())
    sign = 1 if table == "default" else -1
    assert x.shape == (1, 1, 4, 3)
    assert x[0, 0, :, 0].tolist() == [sign * (first + 16 + i) for i in range(4)]
    assert x[0, 0, :, 1].tolist() == [sign * (first + 20 + i) for i in range(4)]
    assert not x[..., 2].any()


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, ["xxxxx...", "xxxxxx..", "........"]),
        (100, ["xxxxx...", "xxxxxx..", "........"]),
        (3, ["..xxx...", "...xxx..", "........"]),
        (1, ["....x...", ".....x..", "........"]),
    ],
)
def test_mask_over_slots(window: int | None, expected: list[str]) -> None:
    assert rows(host(Mask(group="kv", window=window), call())) == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, ["xxxx....x..", "xxxx....xx.", "..........."]),
        (2, ["...x....x..", "........xx.", "..........."]),
    ],
)
def test_mask_over_the_past_and_the_call(window: int | None, expected: list[str]) -> None:
    keys = np.array([0, 1, 2, 3, -1, -1, -1, -1, 4, 5, -1])
    assert rows(host(Mask(group="kv", window=window), call(keys=keys))) == expected


def test_mask_follows_positions_not_slots() -> None:
    keys = np.array([-1, -1, -1, 1, 2, 3, 4, 5])  # the oldest has been shifted out
    assert rows(host(Mask(group="kv"), call(keys=keys))) == ["...xxxx.", "...xxxxx", "........"]


def test_a_mask_of_distances() -> None:
    """Each key that is seen has how far it is away; hidden ones and padding are as ever."""
    keys = np.array([0, 1, 2, 3, -1, -1, -1, -1, 4, 5, -1])
    mask = host(Mask(group="kv", distances=True, window=4), call(keys=keys), np.float16)[0, 0]
    hidden = float(np.float16(-4e4))
    first = [hidden, -3, -2, -1, *[hidden] * 4, 0, hidden, hidden]
    assert mask[0].tolist() == first
    assert mask[1].tolist() == [hidden, hidden, -3, -2, *[hidden] * 4, -1, 0, hidden]
    assert (mask[2] == hidden).all()


def test_mask_is_finite_in_fp16() -> None:
    mask = host(Mask(group="kv"), call(), np.float16)
    assert mask.dtype == np.float16
    assert mask.shape == (1, 1, 3, 8)
    assert np.isfinite(mask).all()
    assert mask.min() == np.float16(-4e4)


def test_write_mask() -> None:
    x = host(WriteMask(group="kv"), call())
    expected = np.zeros((1, 1, 3, 8))
    expected[0, 0, 0, 4] = expected[0, 0, 1, 5] = 1
    assert np.array_equal(x, expected)


def test_position() -> None:
    x = host(Position(group="kv"), call())
    assert (x.tolist(), x.dtype) == ([4], np.int32)


@pytest.mark.parametrize(
    ("contract", "keys", "slots"),
    [
        (
            "readonly",
            [0, 1, 2, *[-1] * 29, 3, 4, -1, -1],
            [0, 1, 2, 3, 4, *[-1] * 27],
        ),
        ("blend", [0, 1, 2, 3, 4, *[-1] * 27], [0, 1, 2, 3, 4, *[-1] * 27]),
        ("stateful", [0, 1, 2, 3, 4, *[-1] * 27], [0, 1, 2, 3, 4, *[-1] * 27]),
        ("stateful-blend", [0, 1, 2, 3, 4, *[-1] * 27], [0, 1, 2, 3, 4, *[-1] * 27]),
    ],
)
def test_prepare(tiny_engine, contract: str, keys: list[int], slots: list[int]) -> None:
    """Two tokens in a call of 4, after three."""
    session = tiny_engine(contract).session()
    session.feed([1, 2, 3], "none")
    made = session.memory.place(np.array([8, 9]), 4)
    assert made.positions.tolist() == [3, 4]
    assert made.width == 4
    assert made.groups["kv"].keys.tolist() == keys
    assert made.groups["kv"].after.tolist() == slots
    assert made.groups["kv"].targets.tolist() == [3, 4]


def test_prepare_a_shift(tiny_engine) -> None:
    session = tiny_engine("shift").session()
    session.feed([1, 2, 3], "none")
    made = session.memory.place(np.array([8, 9, 8, 9]), 4).groups["kv"]
    assert made.keys.tolist() == made.after.tolist() == [-1] * 25 + list(range(7))


@pytest.mark.parametrize(
    ("contract", "after"),
    [
        ("blend", [32, 33, *range(2, 32)]),
        ("stateful-blend", [32, 33, -1, *range(3, 32)]),
        ("stateful-shift", [*range(4, 32), 32, 33, -1, -1]),
    ],
)
def test_refused_columns(contract: Any, after: list[int]) -> None:
    """Two of three tokens stay, in a call of 4. The graph has written the third into a state, and
    has pushed the padding too."""
    group = Slots(contract=contract, count=32, limited=True)
    columns = np.arange(32, 35)
    assert slots_after(group, np.arange(32), columns, columns[:2], 4).tolist() == after


@pytest.mark.parametrize("numbers", [[3], [3, 4, 5], [3, 5], [5, 4], [3, 3], []])
def test_columns_that_follow_each_other_are_a_slice(numbers: list[int]) -> None:
    """Beside sources that follow each other, and beside others."""
    for sources in (list(range(len(numbers))), [7, 1, 2][: len(numbers)]):
        found = list(runs(np.array(numbers, np.int64), sources))
        assert (len(found) == 1) == (numbers in ([3], [3, 4, 5]) and sources != [7, 1, 2])
        for side, wanted in enumerate((numbers, sources)):
            columns = [column for pair in found for column in np.arange(8)[pair[side]]]
            np.testing.assert_array_equal(columns, wanted)
