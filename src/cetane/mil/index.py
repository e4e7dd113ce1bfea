"""The index of a function: the maker, the readers and the type of each value, and its constants.

It covers the ops of nested bodies too. In a program that was read, names are unique and a value is
made before it is read (`validate`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import cached_property

from cetane.mil.program import Argument, Body, MilFunction, Op, StoredConstant, TensorType

AT_RUN_TIME = frozenset(
    ("read_state", "write_state", "cond", "while_loop", "random_bernoulli", "random_categorical",
     "random_normal", "random_uniform")
)  # fmt: skip
"""The ops that every run must compute anew, even on constant inputs."""


class FunctionIndex:
    """A function's ops and values, by name. Each table is made on first use."""

    def __init__(self, function: MilFunction) -> None:
        self.function = function

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops in execution order. The ops of a nested body follow the op that has it."""
        return tuple(flatten(self.function.body))

    @cached_property
    def producers(self) -> dict[str, Op]:
        """The op that makes each value. Inputs and states have none."""
        return {value.name: op for op in self.ops for value in op.outputs}

    @cached_property
    def readers(self) -> dict[str, list[Op]]:
        """The ops that take each value as an argument, each op once."""
        readers: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(names_of(op)):
                readers.setdefault(name, []).append(op)
        return readers

    @cached_property
    def types(self) -> dict[str, TensorType | None]:
        """The declared type of every value, input and state; None for a list or a dictionary."""
        types: dict[str, TensorType | None] = {**self.function.inputs, **self.function.states}
        for op in self.ops:
            types |= {value.name: value.type for value in op.outputs}
            types |= {value.name: value.type for body in op.bodies for value in body.inputs}
        return types

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The names of constants, and of values computed from constants alone."""
        fixed: set[str] = set()
        for op in self.ops:
            if op.kind == "const" or (foldable(op) and fixed.issuperset(op.references())):
                fixed.update(value.name for value in op.outputs)
        return frozenset(fixed)

    def producer(self, argument: Argument | None, kind: str = "") -> Op | None:
        """The op that makes a value, if it is of this kind; None for inputs and literals."""
        op = self.producers.get(argument) if isinstance(argument, str) else None
        return op if op is not None and kind in ("", op.kind) else None

    def type(self, argument: Argument | None) -> TensorType | None:
        """The type of an argument; None if it is not a tensor."""
        if isinstance(argument, StoredConstant):
            return argument.type
        return self.types.get(argument) if argument is not None else None

    def is_fixed(self, argument: Argument) -> bool:
        """Whether an argument is the same in every run."""
        return isinstance(argument, StoredConstant) or argument in self.fixed


def flatten(body: Body) -> Iterator[Op]:
    """The ops of a body, each followed by those of its own bodies."""
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from flatten(inner)


def names_of(op: Op) -> Iterator[str]:
    """The names among an op's arguments, without those in nested bodies."""
    for arguments in op.inputs.values():
        yield from (argument for argument in arguments if isinstance(argument, str))


def foldable(op: Op) -> bool:
    """Whether an op on constants makes a constant.

    Ops of a rewrite have a colon in their kind; they are never folded.
    """
    return op.kind not in AT_RUN_TIME and ":" not in op.kind


def ops_that_make(
    function: MilFunction, names: Iterable[str], given: Container[str] = ()
) -> list[Op]:
    """The ops of a function that make some values, in execution order. None that makes a `given`
    value is among them."""
    needed, made = {*names}, list[Op]()
    for op in reversed(function.ops):
        outputs = [value.name for value in op.outputs]
        if needed.intersection(outputs) and not any(name in given for name in outputs):
            needed.update(op.references())
            made.append(op)
    return made[::-1]


def last_uses(body: Body) -> list[tuple[str, ...]]:
    """For each op, the names of the body's values that no later op reads."""
    needed = set(body.outputs)
    defined = {value.name for value in body.inputs}
    defined.update(value.name for op in body.ops for value in op.outputs)
    frees = []
    for op in reversed(body.ops):
        names = {*op.references(), *(value.name for value in op.outputs)}
        frees.append(tuple(sorted((names & defined) - needed)))
        needed |= names
    return frees[::-1]
