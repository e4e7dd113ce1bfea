"""The translation of a function into a tape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cetane.mil.constants import Constants
from cetane.mil.fast.arrays import HELD_AS
from cetane.mil.fast.tape.assembly import tape_of
from cetane.mil.fast.tape.code import EXACT, Instruction, Opcode, Tape, Unary
from cetane.mil.fast.tape.integers import IntegerBounds, is_integer
from cetane.mil.fast.tape.last_reads import LastReads
from cetane.mil.fast.tape.place import ARENA, FIRST, RUNS_AT, WEIGHTS, Place, strides_of
from cetane.mil.fast.tape.store import ConstantStore
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.translate import live_ops
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Argument, MilFunction, Op

SHARED = 1 << 12
"""The fewest elements of an instruction that threads share. The inputs of a product have about as
many in a call of few tokens: there, sharing saves more time than the threads' wait costs."""
ROWS_FIRST = 1 << 14
"""The fewest elements of logits that lie in memory token by token."""


def write_tape(function: MilFunction, store: ConstantStore) -> Tape:
    """The tape of a rewritten function, whose weights go to a store.

    Bases of the tape from `FIRST` on: inputs, states, outputs, and the states after the call, in
    the function's order. Raises Unsupported for an op without an instruction, and for a flexible
    shape.
    """
    return Writer(function, store).tape()


class Writer:
    """A tape under construction: the places of values, and instructions so far."""

    def __init__(self, function: MilFunction, store: ConstantStore) -> None:
        self.store = store
        self.index = FunctionIndex(function)
        self.constants = Constants(self.index)
        self._function = function
        self._instructions: list[Instruction] = []
        self._blocks: dict[int, int] = {}
        """The floats of each block of the arena."""
        self._values: dict[str, Place] = {}
        """The places of inputs and of results so far, by name."""
        self._states: dict[str, Place] = {}
        """Where each state lies now."""
        self._after: dict[str, Place] = {}
        """Where each state must lie after the call."""
        self._masks: dict[tuple[Place, int], int] = {}
        """The offset of the runs of a mask, by its place and the number of past keys."""
        self._runs = 0
        """The numbers that all runs of masks take so far."""
        self._once: dict[Hashable, Place] = {}
        """Results that only the first use makes."""
        self._copies: dict[Place, Place] = {}
        """Contiguous copies of joined places, while both keep their values."""
        self._moved: dict[int, int] = {}
        """The bases in which blocks lie, in place of the arena."""
        self._integers = IntegerBounds(self.constants)
        for type_ in (*function.inputs.values(), *function.outputs.values()):
            if type_.dtype not in HELD_AS:
                raise Unsupported(f"a tape holds no {type_.dtype}")
        base = FIRST
        for name, type_ in function.inputs.items():
            shape, narrow = _sizes(type_.static_shape, name), type_.dtype == "int8"
            self._values[name] = replace(_array_at(base, shape), narrow=narrow)
            base += 1
        shapes = function.state_shapes()
        for name, shape in shapes.items():
            self._states[name] = _array_at(base, shape)
            base += 1
        self._results = base
        for number, (name, shape) in enumerate(shapes.items()):
            self._after[name] = _array_at(base + len(function.outputs) + number, shape)
        self._ops = [
            op
            for op in live_ops(function)
            if not op.outputs or not all(value.name in self.constants for value in op.outputs)
        ]
        self._last_reads = LastReads(function, self._ops)
        self._time = 0
        """The number of the op that is written."""

    def tape(self) -> Tape:
        """The finished tape. Raises Unsupported as `write_tape`; call it once."""
        for time, op in enumerate(self._ops):
            self._time = time
            self._write(op)
        transposed = self._end()
        instructions = [each.moved(self._moved) for each in self._instructions]
        return replace(tape_of(instructions, self._blocks, self._runs), transposed=transposed)

    def _write(self, op: Op) -> None:
        """Write the instructions of an op, and note where its results lie."""
        from cetane.mil.fast.tape.ops import INSTRUCTIONS

        if op.kind == "read_state":
            self._values[op.outputs[0].name] = self._states[str(op.inputs["input"][0])]
            return
        if op.kind == "write_state":
            (state,), (data,) = op.inputs["input"], op.inputs["data"]
            self._states[str(state)] = self.place(data)
            return
        if op.kind not in INSTRUCTIONS or op.bodies:
            raise Unsupported(f"a tape has no {op.kind}")
        self._integers.add(op)
        result = INSTRUCTIONS[op.kind].call(self, **self._arguments(op))
        places = result if isinstance(result, tuple) else (result,)
        for place, value in zip(places, op.outputs, strict=True):
            type_ = value.type
            shape = _sizes(None if type_ is None else type_.static_shape, value.name)
            if place.shape != shape:
                raise Unsupported(f"{op.kind} gives {place.shape}, not {shape}")
            self._values[value.name] = place

    def _end(self) -> tuple[int, ...]:
        """Let outputs and states lie in their own arrays. Returns the numbers of the outputs that
        lie token by token."""
        transposed = []
        for number, name in enumerate(self._function.outputs):
            place = self.place(name)
            target = _array_at(self._results + number, place.shape)
            strides = place.joined.strides
            if place.size >= ROWS_FIRST and strides[-1] == max(strides) > 1:
                # Logits: the host wants a row for each token.
                target = self.transposed(target)
                transposed.append(number)
            self._end_in(place, target)
        for name, target in self._after.items():
            if self._states[name] != target:
                self._end_in(self._states[name], target)
        return tuple(transposed)

    def _end_in(self, place: Place, target: Place) -> None:
        """Let a value lie in an output, or in a state after the call: its whole block moves there,
        or it is copied."""
        place = self.contiguous(place) if target.contiguous else place
        block = place.block
        if (
            block is not None
            and block not in self._moved
            and self._blocks[block] == target.size
            and place.lies_as(target)
        ):
            self._moved[block] = target.base
        else:
            self.copy(place, target)

    def _arguments(self, op: Op) -> dict[str, Any]:
        from cetane.mil.fast.tape.ops import INSTRUCTIONS

        arguments: dict[str, Any] = {}
        for parameter, passing, given in INSTRUCTIONS[op.kind].arguments(op):
            if passing == "tensors":
                arguments[parameter] = [self.place(item) for item in given]
            elif passing == "tensor":
                arguments[parameter] = self.place(given[0])
            elif passing == "argument":
                arguments[parameter] = given[0]
            elif given[0] in self.constants:
                arguments[parameter] = self.constants.plain(given[0])
            else:
                raise Unsupported(f"{op.kind}: {parameter} is computed in each call")
        return arguments

    def place(self, argument: Argument) -> Place:
        """Where a value or a constant lies."""
        if isinstance(argument, str) and argument in self._values:
            return self._values[argument]
        if argument not in self.constants:
            raise Unsupported(f"{argument} has no place")
        type_ = self.constants.type(argument)
        if is_integer(type_) and self._integers.of(argument) > EXACT:
            raise Unsupported(f"a constant has integers larger than {EXACT}")
        shape = _sizes(type_.static_shape, str(argument))
        key = self.constants.key(argument)
        offset = self.store.floats(key, lambda: self.constants.array(argument))
        return Place(WEIGHTS, offset, shape, strides_of(shape))

    def number(self, value: float, shape: Sequence[int] = ()) -> Place:
        """A stored array of one number."""
        array = np.full(shape, value, np.float32)
        offset = self.store.floats(("number", value, tuple(shape)), lambda: array)
        return Place(WEIGHTS, offset, tuple(shape), strides_of(shape))

    def new(self, shape: Sequence[int], like: Place | None = None) -> Place:
        """A new place in the arena. Its axes lie in memory in the order of those of `like`, or of
        its shape."""
        shape = tuple(shape)
        strides = strides_of(shape)
        if like is not None and len(like.shape) == len(shape):
            order = sorted(
                range(len(shape)),
                key=lambda axis: (shape[axis] == 1, -like.strides[axis], axis),
            )
            sizes = strides_of([shape[axis] for axis in order])
            strides = tuple(sizes[order.index(axis)] for axis in range(len(shape)))
        block = len(self._blocks)
        self._blocks[block] = int(np.prod(shape, dtype=np.int64))
        return Place(ARENA, 0, shape, strides, block)

    def transposed(self, place: Place) -> Place:
        """The place with its last axis first in memory."""
        *shape, last = place.shape
        strides = strides_of((last, *shape))
        return place.at(0, place.shape, (*strides[1:], strides[0]))

    def emit(
        self, opcode: Opcode, result: Place, *operands: Place, kind: int = 0,
        parameters: Sequence[int] = (), numbers: Sequence[float] = (),
        unstrided: Sequence[Place] = (), shared: bool | None = None,
    ) -> Place:  # fmt: skip
        """Add an instruction, and return its result. By default, threads share it if its result is
        large."""
        if opcode is not Opcode.WIDEN and any(place.narrow for place in (*operands, *unstrided)):
            raise Unsupported("an operand of 8 bits")
        self._copies = {
            place: copy
            for place, copy in self._copies.items()
            if not place.shares(result) and not copy.shares(result)
        }
        self._instructions.append(
            Instruction(
                opcode, result, operands, kind, tuple(map(int, parameters)),
                tuple(map(float, numbers)),
                result.size >= SHARED if shared is None else shared, tuple(unstrided),
            )
        )  # fmt: skip
        return result

    def copy(self, source: Place, target: Place) -> Place:
        """Copy elements into a place of the same shape, from a contiguous copy if there is one."""
        return self.emit(Opcode.UNARY, target, self._copied(source) or source, kind=Unary.COPY)

    def contiguous(self, place: Place) -> Place:
        """The place, or a copy of it that is contiguous."""
        if place.contiguous:
            return place
        if (known := self._copied(place)) is not None:
            return known
        copy = self.copy(place, self.new(place.shape))
        self._copies[place.joined] = copy
        return copy

    def _copied(self, place: Place) -> Place | None:
        """A contiguous copy of a place, if there is one."""
        copy = self._copies.get(place.joined)
        return None if copy is None else copy.at(0, place.shape, strides_of(place.shape))

    def once(self, key: Hashable, operands: Sequence[Place], make: Callable[[], Place]) -> Place:
        """The value of a key. If its operands never change, only the first use makes it."""
        if not all(self._lasts(place) for place in operands):
            return make()
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def _lasts(self, place: Place) -> bool:
        """Whether a place keeps its values: weights and inputs do, and the results of `once`."""
        if place.block is not None:
            return any(place.block == made.block for made in self._once.values())
        return place.base == WEIGHTS or FIRST <= place.base < FIRST + len(self._function.inputs)

    def along(self, place: Place, like: Place) -> Place:
        """`place`, or a copy of it, with axes in the order of those of `like`, as many."""
        axes = [a for a, size in enumerate(place.shape) if size != 1 and place.strides[a]]
        order = sorted(axes, key=lambda a: -place.strides[a])
        if order == sorted(axes, key=lambda a: -like.strides[a]):
            return place
        return self.once(
            ("along", place, tuple(order)), [place],
            lambda: self.copy(place, self.new(place.shape, like)),
        )  # fmt: skip

    def runs(self, mask: Place, past: int, new: int) -> int:
        """The offset of the runs of keys that a contiguous mask shows. Attentions with keys in the
        same parts share them."""
        key = mask, past
        if key not in self._masks:
            self._masks[key] = self._runs
            rows = mask.size // (past + new)
            self.emit(
                Opcode.RUNS, Place(RUNS_AT, 0, (), ()), mask,
                parameters=(rows, past, new, self._runs), shared=False,
            )  # fmt: skip
            self._runs += 1 + 4 * (past + new + 1)
        return self._masks[key]

    def own(self, x: Argument) -> Place:
        """A contiguous place with the values of `x`, which may be overwritten.

        It is the place of `x` itself, if no later op reads it; the place of a state after the call;
        or a copy.
        """
        place = self.place(x)
        for name, target in self._after.items():
            if place == self._states[name] and place.base < self._results:
                return self.copy(place, target)
        changeable = place.block is not None or place in self._after.values()
        if (
            changeable
            and not self._lasts(place)
            and place.contiguous
            and self._last_reads.of(x) <= self._time
        ):
            return place
        return self.copy(place, self.new(place.shape))


def _array_at(base: int, shape: tuple[int, ...]) -> Place:
    return Place(base, 0, shape, strides_of(shape))


def _sizes(shape: tuple[int, ...] | None, name: str) -> tuple[int, ...]:
    if shape is None:
        raise Unsupported(f"{name} has no fixed shape")
    return shape
