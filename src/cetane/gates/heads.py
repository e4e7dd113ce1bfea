"""The slices of a head, and the logits among which a head chooses, as a twin shows them.

A head that gives only its choices hides all other logits. A row that no token of a probe chooses
may be the choice of a user's token.
"""

from collections.abc import Iterable, Mapping

from cetane.engine.backend import Array
from cetane.families import Head
from cetane.gates.experts import with_output
from cetane.lower.tracing import LabelledWeight
from cetane.mil import MilFunction
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


def shown_name(rows: Rows) -> str:
    """The name under which a twin shows the logits of a slice."""
    return f"logits_of_{rows[0]}"


def showing_logits(function: MilFunction, used: Mapping[str, LabelledWeight]) -> MilFunction:
    """The function with the logits among which it chooses as outputs; `used` are its parameters by
    name."""
    for name, constant in used.items():
        head = constant.block
        if isinstance(head, Head) and constant.path == "lm_head.weight":
            value = chosen_among(function, name)
            if value is not None:
                function = with_output(function, value, shown_name((head.start, head.stop)))
    return function


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
