"""Tiny programs that ask for much: refused before anything is allocated."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.mil.programs import constant, op, program

from cetane.errors import CetaneError
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram
from cetane.mil.ops import OPS
from cetane.mil.ops.registry import TensorList
from cetane.mil.program import (
    Body,
    MilFunction,
    NamedValue,
    Op,
    SizeRange,
    StoredConstant,
    TensorType,
)
from cetane.mil.validate import check_function

FAR = 10**5
WIDE = 2**14
ASKED: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "a crop that pads": (
        (1, 1, 4, 4), "crop", {"crop_height": [-FAR, 0], "crop_width": [-FAR, 0]},
    ),
    "a batch of padding": (
        (1, 1, 4, 4), "space_to_batch",
        {"block_shape": [2, 2], "paddings": [[0, FAR], [0, FAR]]},
    ),
    "a negative crop": (
        (4, 1, 4, 4), "batch_to_space", {"block_shape": [2, 2], "crops": [[-FAR, 0], [-FAR, 0]]},
    ),
    "the same row again and again": (
        (2**14, 2**10), "gather_nd", {"indices": np.zeros((2**19, 1), np.int32)},
    ),
}  # fmt: skip


def declared_as(x: tuple[int, ...], kind: str, **inputs: Any) -> Op:
    """An op whose result is declared to be as small as its input."""
    given = {name: constant(value) for name, value in inputs.items()}
    return op(kind, "y", "fp32", x, x="x", **given)


@pytest.mark.parametrize("name", ASKED)
def test_more_than_it_says(name: str) -> None:
    shape, kind, inputs = ASKED[name]
    with pytest.raises(CetaneError):
        program({"x": shape}, declared_as(shape, kind, **inputs))


def recurrent(kind: str, gates: int, **shapes: tuple[int, ...]) -> Op:
    """One step of a batch of `WIDE` rows, whose hidden state is as wide."""
    hidden = gates * WIDE
    given = {"weight_ih": (hidden, 1), "weight_hh": (hidden, WIDE)} | shapes
    states = ("initial_h", "initial_c")[: 1 + (kind == "lstm")]
    values = {name: zeros(*shape) for name, shape in given.items()}
    values |= {name: zeros(WIDE, WIDE) for name in states}
    results = typed("y", (1, 1, 1)), typed("h", (1, 1)), typed("c", (1, 1))
    inputs = {name: (value,) for name, value in values.items()}
    return Op(kind, "y", {"x": ("x",), **inputs}, results[: 1 + len(states)])


def typed(name: str, shape: tuple[int | SizeRange, ...], dtype: str = "fp32") -> NamedValue:
    return NamedValue(name, TensorType(shape, dtype))


def zeros(*shape: int) -> StoredConstant:
    return StoredConstant(TensorType(shape, "fp32"), lambda: np.zeros(shape, np.float32))


@pytest.mark.parametrize(("kind", "gates"), [("rnn", 1), ("gru", 3), ("lstm", 4)])
def test_hidden_states_larger_than_they_say(kind: str, gates: int) -> None:
    with pytest.raises(CetaneError, match=r"elements|computes the shape"):
        program({"x": (2, WIDE, 1)}, recurrent(kind, gates))


@pytest.mark.parametrize("name", ["weight_ih", "weight_hh", "bias", "initial_h"])
def test_weights_of_another_size(name: str) -> None:
    """Of which a sum would be broadcast without a word."""
    shapes = {"weight_ih": (4, 3), "weight_hh": (4, 4), "bias": (4,), "initial_h": (2, 4)}
    wrong = {"weight_ih": (1, 3), "weight_hh": (1, 4), "bias": (1,), "initial_h": (1, 4)}
    for given in (shapes, shapes | {name: wrong[name]}):
        inputs = {key: (zeros(*shape),) for key, shape in given.items()}
        results = typed("y", (1, 2, 4)), typed("h", (2, 4))
        op_ = Op("rnn", "y", {"x": ("x",), **inputs}, results)
        if given is shapes:
            program({"x": (5, 2, 3)}, op_)
        else:
            with pytest.raises(CetaneError, match=f"{name} do not fit"):
                program({"x": (5, 2, 3)}, op_)


@pytest.mark.parametrize("count", [0, 6, -2])
def test_more_than_there_are(count: int) -> None:
    best = typed("y", (5,)), typed("i", (5,), "int32")
    inputs = {"x": ("x",), "k": (constant(count),), "axis": (constant(0),)}
    with pytest.raises(CetaneError, match=f"5 elements have no {count} largest"):
        program({"x": (5,)}, Op("topk", "y", inputs, best))


def test_an_element_of_a_list_that_is_read_often() -> None:
    often = TensorList((torch.zeros(()).expand(WIDE, WIDE),), None)
    with pytest.raises(ValueError, match="elements"):
        OPS["list_gather"].call(ls=often, indices=[0] * WIDE)


def test_a_list_of_elements_that_each_fit() -> None:
    """A loop may write 100,000 of them."""
    ls = TensorList((), None)
    for index in range(16):
        ls = OPS["list_write"].call(ls=ls, index=index, value=torch.zeros(()).expand(2**24))
    with pytest.raises(ValueError, match="elements"):
        OPS["list_write"].call(ls=ls, index=16, value=torch.zeros(1))


@pytest.mark.parametrize("entries", [1, 3, 5])
def test_a_palette_whose_indices_have_no_whole_bits(entries: int) -> None:
    """Of iOS 16, which packs them. A palette of three was read with indices of one bit."""
    packed = StoredConstant(TensorType((8,), "uint8"), lambda: np.zeros(8, np.uint8))
    given = {"indices": (packed,), "lut": (zeros(entries),), "shape": (constant([4, 4]),)}
    with pytest.raises(CetaneError, match=f"a palette of {entries} entries"):
        program({}, Op("constexpr_lut_to_dense", "y", given, (typed("y", (4, 4)),)))


@pytest.mark.parametrize("kind", ["add", "maximum"])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_arithmetic_that_is_declared_of_another_type(kind: str, dtype: str) -> None:
    array = np.ones(3, np.float32)
    one = StoredConstant(TensorType((3,), "fp32"), lambda: array)
    with pytest.raises(CetaneError, match="it computes fp32, but y is declared"):
        program({"x": (3,)}, op(kind, "y", dtype, (3,), x="x", y=one))


def test_a_range_that_only_a_run_knows() -> None:
    ending = op("range_1d", "y", "int32", (4,), start=constant(0), end="end", step=constant(1))
    function = program({"end": ()}, ending, dtype="int32").functions["main"]
    with pytest.raises(CetaneError, match="elements"):
        Executable(function, "fp32")({"end": np.array(2**31 - 1, np.int32)})


def test_sizes_that_an_op_makes_of_literals() -> None:
    """The check of a program reads literals alone."""
    ops = (
        op("mul", "n", "int32", (2,), x=constant([FAR, FAR]), y=constant([FAR, FAR])),
        op("tile", "f", "fp32", (1, 1), x="x", reps="n"),
    )
    made = program({"x": (1, 1)}, *ops, op("relu", "y", "fp32", (1, 1), x="f"))
    with pytest.raises(CetaneError, match=r"tile f: the shape .* elements"):
        Executable(made.functions["main"], "fp32")({"x": np.ones((1, 1), np.float32)})
    with pytest.raises(CetaneError, match=r"tile f: the shape .* elements"):
        FastProgram(made).function("main")


@pytest.mark.parametrize("kind", ["fill", "range_1d", "tile"])
def test_sizes_that_a_call_computes(kind: str) -> None:
    """Only the reference bounds them, so no graph takes them."""
    shape = (SizeRange(),) if kind == "range_1d" else (SizeRange(), SizeRange())
    inputs: dict[str, dict[str, Any]] = {
        "fill": {"shape": "n", "value": constant(1)},
        "range_1d": {"start": constant(0), "end": "n", "step": constant(1)},
        "tile": {"x": constant([[1]]), "reps": "n"},
    }
    size = (2,) if kind != "range_1d" else ()
    given = {name: (value,) for name, value in inputs[kind].items()}
    many = Op(kind, "f", given, (typed("f", shape, "int32"),))
    total = op("reduce_sum", "y", "int32", (), x="f")
    twice = op("mul", "n", "int32", size, x="by", y="by")
    made = program({"by": size}, twice, many, total, dtype="int32")
    feeds = {"by": np.full(size, 2**15, np.int32)}
    with pytest.raises(CetaneError, match=f"{kind} f: the shape .* elements"):
        Executable(made.functions["main"], "fp32")(feeds)
    with pytest.raises(CetaneError, match=kind):
        FastProgram(made).function("main")


@pytest.mark.parametrize("end", [1, 3])
def test_an_update_that_is_no_slice(end: int) -> None:
    """A graph takes the update's own shape, and the reference would turn it."""
    update = op("slice_update", "y", "fp32", (4,), x="x", update="u", begin=constant([0]),
                end=constant([end]))  # fmt: skip
    with pytest.raises(CetaneError, match=r"an update of \(2,\) does not fit a slice of"):
        program({"x": (4,), "u": (2,)}, update)


def looped(variable: NamedValue, inside: NamedValue, again: str) -> Op:
    """A loop that doubles a variable, declared `inside`, as long as it is told `again`."""
    result = NamedValue("d", inside.type or TensorType((), "fp32"))
    double = op("add", "d", "fp32", (), x=inside.name, y=inside.name)
    body = Body((inside,), (replace(double, outputs=(result,)),), ("d",))
    ask = Body((replace(inside, name="w"),), (), (again,))
    return Op("while_loop", "y", {"loop_vars": (variable.name,)}, (typed("y", (2,)),), (ask, body))


@pytest.mark.parametrize(
    ("inside", "again", "why"),
    [
        (typed("v", (3,)), "go", r"fp32 \(2\) is passed, where fp32 \(3\) is declared"),
        (typed("v", (2,), "fp16"), "go", r"fp32 \(2\) is passed, where fp16 \(2\) is declared"),
        (NamedValue("v", None), "go", "a list is declared"),
        (typed("v", (2,)), "w", "its condition is not one bool"),
    ],
)
def test_loops_whose_variables_change_their_types(inside: NamedValue, again: str, why: str) -> None:
    go = op("less", "go", "bool", (), x=constant(0), y=constant(1))
    with pytest.raises(CetaneError, match=why):
        program({"x": (2,)}, go, looped(typed("x", (2,)), inside, again))


def test_a_loop_that_gets_more_than_it_says() -> None:
    """The ops inside are checked for the declared sizes alone."""
    flexible = TensorType((SizeRange(1),), "fp32")
    go = op("less", "go", "bool", (), x=constant(0), y=constant(1))
    ops = (go, looped(NamedValue("x", flexible), typed("v", (2,)), "go"))
    y = TensorType((2,), "fp32")
    function = MilFunction("main", {"x": flexible}, {"y": y}, {}, Body((), ops, ("y",)))
    check_function(function)
    with pytest.raises(CetaneError, match=r"w has the shape \(3,\), but is declared as fp32 \(2\)"):
        Executable(function, "fp32")({"x": np.ones(3, np.float32)})


def many(made: Callable[[int], Op], count: int) -> list[Op]:
    """Ops of which the last adds up the first, so that all are held at one time."""
    ops = [made(number) for number in range(count)]
    shape = (1, 2**28)
    for number in range(1, count):
        left = "a0" if number == 1 else f"s{number - 1}"
        ops.append(op("add", f"s{number}", "fp32", shape, x=left, y=f"a{number}"))
    return [*ops, op("slice_by_size", "y", "fp32", (1, 1), x=ops[-1].name,
                     begin=constant([0, 0]), size=constant([1, 1]))]  # fmt: skip


def tiled(number: int) -> Op:
    return op("tile", f"a{number}", "fp32", (1, 2**28), x="x", reps=constant([1, 2**28]))


def filled(number: int) -> Op:
    """A constant, which is made before the first run and kept."""
    one = op("fill", f"a{number}", "fp32", (1, 2**28), value=zeros())
    return replace(one, inputs=one.inputs | {"shape": (constant([1, 2**28]),)})


@pytest.mark.parametrize("made", [tiled, filled])
def test_more_than_memory_of_values_that_each_fit(made: Callable[[int], Op]) -> None:
    """Forty such lines took 40 GB."""
    program({"x": (1, 1)}, *many(made, 3))
    with pytest.raises(CetaneError, match="its ops hold more than 2,147,483,649 elements"):
        program({"x": (1, 1)}, *many(made, 9))


def test_constants_that_are_made_of_others_which_stay() -> None:
    one = filled(0)
    sums = [op("add", f"b{n}", "fp32", (1, 2**28), x="a0", y="a0") for n in range(9)]
    with pytest.raises(CetaneError, match="its ops hold more than"):
        program({"x": (1, 1)}, one, *sums, op("identity", "y", "fp32", (1, 1), x="x"))


def test_values_that_are_freed_are_not_counted() -> None:
    """Nor are constants that are moved, which are as large as their file."""
    wide = [tiled(number) for number in range(20)]
    program({"x": (1, 1)}, *wide, op("identity", "y", "fp32", (1, 1), x="x"))
    moved = [
        op("transpose", f"a{n}", "fp32", (2**28, 1), x=zeros(1, 2**28), perm=constant([1, 0]))
        for n in range(20)
    ]
    program({"x": (1, 1)}, *moved, op("identity", "y", "fp32", (1, 1), x="x"))


def test_values_inside_a_loop_are_counted() -> None:
    ops = many(tiled, 9)
    inner = Body((typed("x0", (1, 1)),), tuple(ops), ("y",))
    again = Body((typed("x0", (1, 1)),), (op("less", "c", "bool", (1, 1), x="x0", y="x0"),), ("c",))
    loop = Op("while_loop", "z", {"loop_vars": ("x",)}, (typed("z", (1, 1)),), (again, inner))
    function = MilFunction(
        "main", {"x": TensorType((1, 1), "fp32")}, {"z": TensorType((1, 1), "fp32")}, {},
        Body((), (loop,), ("z",)),
    )  # fmt: skip
    with pytest.raises(CetaneError, match="its ops hold more than"):
        check_function(function)


def test_many_bodies_beside_many_values() -> None:
    """Each body had a copy of the names that it may read: some 5 minutes for 125,000 conditions."""
    inputs = {f"x{number}": TensorType((1,), "fp32") for number in range(30_000)}
    branches = (Body((), (), ("x0",)), Body((), (), ("x1",)))
    ops = [
        Op("cond", f"y{number}", {"pred": ("p",)}, (typed(f"y{number}", (1,)),), branches)
        for number in range(3000)
    ]
    given = inputs | {"p": TensorType((), "bool")}
    y = TensorType((1,), "fp32")
    started = time.process_time()
    check_function(MilFunction("main", given, {"y0": y}, {}, Body((), tuple(ops), ("y0",))))
    assert time.process_time() - started < 2
