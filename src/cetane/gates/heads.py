"""The slices of a head, and the logits among which a head chooses, as a twin shows them.

A head that gives only its choices hides all other logits. A row that no token of a probe chooses
may be the choice of a user's token.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cetane.engine.backend import Array
from cetane.families import Head
from cetane.gates.experts import with_output
from cetane.lower.tracing import LabelledWeight
from cetane.mil import MilFunction
from cetane.mil.executor import Executable
from cetane.mil.index import ops_that_make
from cetane.mil.program import NamedValue
from cetane.schema.function import Function
from cetane.schema.interface import ToChoice, ToLogits

Rows = tuple[int, int]
"""Where a slice of the head's rows begins, and where it stops."""


def head_slices(functions: Iterable[Function]) -> set[Rows]:
    """The rows of the head that functions compute, or choose among: where each slice begins and
    stops."""
    sinks = (item.sink for function in functions for item in function.outputs)
    return {(sink.start, sink.stop) for sink in sinks if isinstance(sink, ToLogits | ToChoice)}


def head_choices(function: Function) -> bool:
    """Whether a function gives choices of the head in place of logits."""
    return any(isinstance(item.sink, ToChoice) for item in function.outputs)


def shown_name(rows: Rows) -> str:
    """The name under which a twin shows the logits of a slice."""
    return f"logits_of_{rows[0]}"


def showing_logits(function: MilFunction, used: Mapping[str, LabelledWeight]) -> MilFunction:
    """The function with the logits among which it chooses as outputs; `used` are its parameters by
    name."""
    for rows, value in choices(function, used):
        if value is not None:
            function = with_output(function, value, shown_name(rows))
    return function


def choices(
    function: MilFunction, used: Mapping[str, LabelledWeight]
) -> Iterator[tuple[Rows, NamedValue | None]]:
    """The slices of the head in a function, and the logits among which it chooses."""
    for name, constant in used.items():
        head = constant.block
        if isinstance(head, Head) and constant.path == "lm_head.weight":
            yield (head.start, head.stop), chosen_among(function, name)


def chosen_among(function: MilFunction, weight: str) -> NamedValue | None:
    """The first value behind a head's weight whose maximum is taken; None in a function without
    one."""
    values, reached = dict[str, NamedValue](), {weight}
    for op in function.ops:
        values.update({value.name: value for value in op.outputs})
        if reached.isdisjoint(op.references()):
            continue
        if op.kind in ("reduce_max", "reduce_argmax"):
            (read,) = op.inputs["x"]
            return values.get(read) if isinstance(read, str) else None
        reached.update(value.name for value in op.outputs)
    return None


def shown_logits(value: Array, rows: Rows, tokens: int) -> Array:
    """The logits `(tokens, rows)` of what a twin shows: `(1, rows, T)`, or `(1, T, blocks, size)`
    with more places than rows."""
    start, stop = rows
    by_token = value[0].T if value.ndim == 3 else value.reshape(value.shape[1], -1)
    logits: Array = by_token[:tokens, : stop - start]
    return logits


@dataclass(frozen=True)
class Chooser:
    """What a function makes of the logits of a slice: it chooses one, by tables of numbers."""

    function: MilFunction
    """These ops alone. Their only input are the logits."""
    tokens: int
    """The tokens of a call, also where the ops take any number."""
    sinks: Mapping[str, ToChoice]

    @property
    def sink(self) -> ToChoice:
        """The slice, and how it is cut into blocks."""
        return next(iter(self.sinks.values()))

    def tried(self) -> Array:
        """The rows that show all entries of the tables: a row of each block, and each place in two
        blocks. Without blocks, all rows."""
        count, size = self.sink.stop - self.sink.start, self.sink.block
        if size == 1:
            return np.arange(count)
        blocks, places = np.arange(-(-count // size)), np.arange(size)
        in_block = [size * ((places + more) % (count // size or 1)) + places for more in (0, 1)]
        rows = np.concatenate([size * blocks + blocks % size, *in_block])
        return np.unique(np.minimum(rows, count - 1))

    def wrong_rows(self) -> list[int]:
        """The rows of `tried` that are not chosen where their logit is the largest, or with another
        logit."""
        ((name, type_),) = self.function.inputs.items()
        tokens, run, wrong = self.tokens, Executable(self.function), list[int]()
        shape = tuple(size if isinstance(size, int) else tokens for size in type_.shape)
        tried = self.tried()
        for start in range(0, len(tried), tokens):
            rows = np.resize(tried[start : start + tokens], tokens)
            logits = np.full(shape, LOW, np.float32)
            by_token = logits[0].T if len(shape) == 3 else logits.reshape(tokens, -1)
            by_token[np.arange(tokens), rows] = BEST
            made = run({name: logits})
            chosen, largest = rows, np.full(tokens, BEST)
            for output, own in self.sinks.items():
                value = made[output].astype(np.float32)
                if own.part == "logit":
                    largest = value.reshape(-1)
                else:
                    chosen = own.block * value[0] + value[1:].sum(0)
            wrong += rows[(chosen != rows) | (largest != BEST)].tolist()
        return wrong


LOW, BEST = -2.0, -1.0
"""Logits for `Chooser.wrong_rows`, exact in fp16. All of a token's logits may be below 0."""


def chooser(
    function: MilFunction, own: Function, rows: Rows, value: NamedValue | None
) -> Chooser | None:
    """What a function makes of the logits `value` of a slice; `own` is the planner's function. None
    without such logits, and if it reads anything else."""
    if value is None or value.type is None:
        return None
    sinks = {
        item.name: item.sink
        for item in own.outputs
        if isinstance(item.sink, ToChoice) and (item.sink.start, item.sink.stop) == rows
    }
    ops = ops_that_make(function, sinks, given=(value.name,))
    read = {*sinks, *(name for op in ops for name in op.references())}
    if read & {*function.inputs, *function.states}:
        return None
    part = replace(
        function,
        inputs={value.name: value.type},
        outputs={name: function.outputs[name] for name in sinks},
        states={},
        body=replace(function.body, inputs=(value,), ops=tuple(ops), outputs=(*sinks,)),
        interface=None,
    )
    return Chooser(part, own.tokens, sinks)
