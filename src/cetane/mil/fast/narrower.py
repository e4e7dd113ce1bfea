"""Functions for fewer tokens than those of a program.

A package has functions for one token and for eight, say, and none for two. Two functions that
differ only in their number of tokens have the same ops on the same weights. A number that differs
between them, a size or the bound of a slice, grows linearly with the tokens. So the function for a
number of tokens between the two is known too, and needs no weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.constants import Constants
from cetane.mil.fast.context import constant
from cetane.mil.fast.functions import NARROW, at_tokens
from cetane.mil.index import FunctionIndex
from cetane.mil.program import (
    Argument,
    Body,
    MilFunction,
    NamedValue,
    Op,
    Program,
    Signature,
    StoredConstant,
    TensorType,
)
from cetane.mil.validate import HIGHEST_RANK, check_function

WIDEST = 16
"""The tokens of the widest function that gets narrower ones: a longer call is a piece of a prompt,
and its attention adds keys in another order."""


def narrower(program: Program) -> dict[str, MilFunction]:
    """The functions of a program for fewer tokens, by name."""
    return {
        name: function
        for wide in program.functions.values()
        for name, function in _narrower(program, wide).items()
    }


def _narrower(program: Program, wide: MilFunction) -> dict[str, MilFunction]:
    ones = _narrow_ones(program, wide)
    for few, other in sorted(ones, key=lambda one: one[0], reverse=True):
        many = tokens_of(other, wide)[1]
        counts = [count for count in NARROW if few < count < many <= WIDEST]
        if not counts:
            continue  # such as the same tokens at a smaller capacity: only the slots are fewer
        with suppress(ValueError, CetaneError):
            return {at_tokens(wide.name, n): between(other, wide, n) for n in counts}
    return {}


def _narrow_ones(program: Program, wide: MilFunction) -> list[tuple[int, MilFunction]]:
    """Functions that may be `wide` for fewer tokens, each with its number of tokens. Some may be
    those of an adapter, which has other weights."""
    found = []
    for other in program.functions.values():
        with suppress(ValueError):
            found.append((tokens_of(other, wide)[0], other))
    return found


def tokens_of(few: Signature, many: Signature) -> tuple[int, int]:
    """The numbers of tokens of two functions that differ only in these.

    Sizes of inputs that differ must all differ by one number. The smallest pair of them is the
    tokens: larger ones have a past too. Raises ValueError for functions that differ in more.
    """
    _same(list(few.inputs), list(many.inputs))
    pairs = {
        (a, b)
        for name, type_ in many.inputs.items()
        for a, b in _sizes(few.inputs[name], type_)
        if a != b
    }
    differences = {b - a for a, b in pairs}
    if len(differences) != 1 or min(differences) < 0:
        raise ValueError("the functions differ in more than their tokens")
    return min(pairs)


def between(few: MilFunction, many: MilFunction, tokens: int) -> MilFunction:
    """`many`, for a number of tokens between those of two functions that differ only in these.

    Raises ValueError if the two differ in more, and CetaneError if the result is no valid function.
    """
    function = _Line(few, many, tokens).function()
    check_function(function)
    return function


class _Line:
    """The line through two functions, at a number of tokens."""

    def __init__(self, few: MilFunction, many: MilFunction, tokens: int) -> None:
        self._few, self._many, self._tokens = few, many, tokens
        self._ends = tokens_of(few, many)
        self._constants = Constants(FunctionIndex(few)), Constants(FunctionIndex(many))

    def function(self) -> MilFunction:
        few, many = self._few, self._many
        _same(few.states, many.states)
        _same(few.body.outputs, many.body.outputs)
        _same(few.dictionaries, many.dictionaries)
        ops = [self._op(a, b) for a, b in zip(few.body.ops, many.body.ops, strict=True)]
        inputs = self._types(few.inputs, many.inputs)
        given = tuple(replace(v, type=inputs.get(v.name, v.type)) for v in many.body.inputs)
        return replace(
            many,
            name=at_tokens(many.name, self._tokens),
            inputs=inputs,
            outputs=self._types(few.outputs, many.outputs),
            body=Body(given, tuple(ops), many.body.outputs),
        )

    def _number(self, a: int, b: int) -> int:
        low, high = self._ends
        number, rest = divmod((b - a) * (self._tokens - low), high - low)
        if rest:
            raise ValueError(f"{a} and {b} give no whole number between them")
        return a + number

    def _types(
        self, few: Mapping[str, TensorType], many: Mapping[str, TensorType]
    ) -> dict[str, TensorType]:
        return {name: self._type(few[name], type_) for name, type_ in many.items()}

    def _type(self, few: TensorType, many: TensorType) -> TensorType:
        _same(few.dtype, many.dtype)
        if few == many:
            return many
        return TensorType(tuple(self._number(a, b) for a, b in _sizes(few, many)), many.dtype)

    def _op(self, few: Op, many: Op) -> Op:
        if many.bodies:
            raise ValueError("an op with bodies")
        _same((few.kind, few.name, list(few.inputs)), (many.kind, many.name, list(many.inputs)))
        given = {
            name: tuple(
                self._argument(a, b) for a, b in zip(few.inputs[name], arguments, strict=True)
            )
            for name, arguments in many.inputs.items()
        }
        made = [self._value(a, b) for a, b in zip(few.outputs, many.outputs, strict=True)]
        return Op(many.kind, many.name, given, tuple(made))

    def _value(self, few: NamedValue, many: NamedValue) -> NamedValue:
        _same(few.name, many.name)
        if few.type is None or many.type is None:
            _same(few.type, many.type)
            return many
        return NamedValue(many.name, self._type(few.type, many.type))

    def _argument(self, few: Argument, many: Argument) -> Argument:
        if not isinstance(few, StoredConstant) or not isinstance(many, StoredConstant):
            _same(few, many)
            return many
        if few.type != many.type:
            return self._repeated(few, many)
        keys = [own.key(a) for own, a in zip(self._constants, (few, many), strict=True)]
        if keys[0] == keys[1]:
            return many
        a, b = few.numpy(), many.numpy()
        if a.dtype != np.int32 or a.ndim > 1 or a.size > HIGHEST_RANK:
            raise ValueError("constants that are no sizes")
        numbers = [self._number(int(x), int(y)) for x, y in zip(a.flat, b.flat, strict=True)]
        return constant(np.array(numbers, a.dtype).reshape(a.shape), many.type.dtype)

    def _repeated(self, few: StoredConstant, many: StoredConstant) -> StoredConstant:
        """A constant that is the same for every token."""
        type_ = self._type(few.type, many.type)
        one = few.numpy()
        if not np.array_equal(np.broadcast_to(one, many.type.static_shape or ()), many.numpy()):
            raise ValueError("a constant differs between tokens")
        return constant(np.broadcast_to(one, type_.static_shape or ()), type_.dtype)


def _sizes(few: TensorType, many: TensorType) -> list[tuple[int, int]]:
    """The sizes of two types, in pairs. Raises ValueError for others than fixed sizes."""
    one, other = few.static_shape, many.static_shape
    if one is None or other is None:
        raise ValueError("a shape that is not fixed")
    return list(zip(one, other, strict=True))


def _same(one: object, other: object) -> None:
    if one != other:
        raise ValueError("the functions differ in more than their tokens")
