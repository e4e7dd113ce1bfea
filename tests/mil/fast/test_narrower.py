"""Functions for fewer tokens lie on the line through two of a program's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.mil import MilFunction, Program, load
from cetane.mil.constants import Constants
from cetane.mil.fast.context import constant
from cetane.mil.fast.narrower import between, narrower, tokens_of
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Body, NamedValue, Op, StoredConstant, TensorType


@pytest.fixture(params=["readonly", "blend", "stateful"])
def program(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Bundle]) -> Program:
    """All layers of a tiny llama, for 1, 3 and 8 tokens."""
    bundle = tiny_bundle(contract=request.param, layout={"kind": "chunks", "chunks": 1})
    return load(bundle.shard("chunk-00"))


def content(function: MilFunction) -> list[Any]:
    """Everything that a function computes; weights by their place in the file."""
    constants = Constants(FunctionIndex(function))

    def known(argument: str | StoredConstant) -> Any:
        return argument if isinstance(argument, str) else constants.key(argument)

    return [
        (op.kind, op.name, {n: [known(a) for a in given] for n, given in op.inputs.items()},
         op.outputs)
        for op in function.body.ops
    ]  # fmt: skip


def test_a_function_between_two_others_is_the_programs_own(program: Program) -> None:
    """The converter made one for three tokens: the line from one token to eight meets it."""
    decode, verify, prefill = (program.functions[n] for n in ("decode", "verify", "prefill"))
    assert tokens_of(decode, verify) == (1, 3)
    assert tokens_of(decode, prefill) == (1, 8)
    found = between(decode, prefill, 3)
    assert (found.inputs, found.outputs, found.states) == (
        verify.inputs, verify.outputs, verify.states,
    )  # fmt: skip
    assert content(found) == content(verify)


def test_a_program_gets_functions_between_its_own(program: Program) -> None:
    """Two lies between one token and three, four between three and eight."""
    found = narrower(program)
    assert set(found) == {"verify@2", "prefill@4"}
    assert {found[name].inputs["hidden"].shape[-1] for name in found} == {2, 4}


@pytest.mark.parametrize("contract", ["readonly", "stateful"])
def test_every_capacity_gets_them(tiny_bundle: Callable[..., Bundle], contract: str) -> None:
    """Functions of a smaller capacity differ in one number too, their slots."""
    cache = {"contract": contract, "context": 64, "capacities": (32,)}
    bundle = tiny_bundle(cache=cache, layout={"kind": "chunks", "chunks": 1})
    found = narrower(load(bundle.shard("chunk-00")))
    assert set(found) == {"verify@2", "prefill@4", "verify-c32@2", "prefill-c32@4"}


def test_functions_with_other_numbers_have_nothing_between_them(program: Program) -> None:
    decode, verify = program.functions["decode"], program.functions["verify"]

    def changed(name: str, array: np.ndarray, dtype: str) -> MilFunction:
        ops = [
            replace(op, inputs={"val": (constant(array, dtype),)}) if op.name == name else op
            for op in verify.body.ops
        ]
        return replace(verify, body=replace(verify.body, ops=tuple(ops)))

    number = next(op for op in verify.body.ops if _is_number(op))
    with pytest.raises(ValueError, match="no sizes"):
        between(decode, changed(number.name, np.array(2.0, np.float16), "fp16"), 2)
    with pytest.raises(ValueError, match="more than their tokens"):
        between(decode, replace(verify, states={"other": decode.inputs["hidden"]}), 2)
    shape = next(op for op in verify.body.ops if _is_shape(op))
    (value,) = shape.inputs["val"]
    assert isinstance(value, StoredConstant)
    with pytest.raises(ValueError, match="no whole number"):
        between(decode, changed(shape.name, value.numpy() + 1, "int32"), 2)


def test_a_constant_may_repeat_a_tokens_own_values() -> None:
    """The routers of a mixture of experts compare with ones for every expert and token."""

    def function(tokens: int, ones: np.ndarray) -> MilFunction:
        type_ = TensorType((1, 3, 1, tokens), "fp16")
        given, made = NamedValue("x", type_), NamedValue("y", type_)
        op = Op("add", "y", {"x": ("x",), "y": (constant(ones, "fp16"),)}, (made,))
        return MilFunction(
            "main", {"x": type_}, {"y": type_}, {}, Body((given,), (op,), ("y",))
        )  # fmt: skip

    one = np.array([1, 2, 3], np.float16).reshape(1, 3, 1, 1)
    found = between(function(1, one), function(4, np.tile(one, 4)), 2)
    (argument,) = found.body.ops[0].inputs["y"]
    assert isinstance(argument, StoredConstant)
    np.testing.assert_array_equal(argument.numpy(), np.tile(one, 2))
    with pytest.raises(ValueError, match="differs between tokens"):
        between(function(1, one), function(4, np.arange(12.0).reshape(1, 3, 1, 4)), 2)


def _is_number(op: Op) -> bool:
    type_ = op.outputs[0].type if op.kind == "const" else None
    return type_ is not None and type_.dtype == "fp16" and type_.shape == ()


def _is_shape(op: Op) -> bool:
    type_ = op.outputs[0].type if op.kind == "const" else None
    return type_ is not None and type_.dtype == "int32" and type_.shape == (4,)
