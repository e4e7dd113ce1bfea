"""Converted functions, and how one conversion serves all functions of a form."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cetane.compress.encoded import Encoded
from cetane.lower.recorder import Slice
from cetane.lower.structure import Form

ConstantOf = Callable[[str], Encoded]
"""A function that gives the constant of a label."""


@dataclass(frozen=True)
class Converted:
    """One function whose weights are names without values."""

    spec: Any
    """A model of this function alone, a protobuf message."""
    arrays: Mapping[str, np.ndarray[Any, Any]]
    """The other constants that are arrays, by name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of weights, in place of those in `spec`."""
    slices: Mapping[Slice, Slice] = field(default_factory=dict)
    """Slices in place of those in `spec`."""

    def __reduce__(self) -> Any:
        """For pickle, which cannot send messages of coremltools' protobuf."""
        rest = dict(self.arrays), dict(self.labels), dict(self.slices)
        return parsed, (self.spec.SerializeToString(), *rest)

    @property
    def function(self) -> Any:
        """The function in `spec`."""
        return self.spec.mlProgram.functions["main"]

    def renamed(self, own: Form, other: Form) -> "Converted | None":
        """This function with the weights and slices of `other`, a form with the same lines.

        `own` is the form of this function. None if the program's slices do not tell which of them
        differ.
        """
        pairs = set(zip(own.slices, other.slices, strict=True))
        changed = {old: new for old, new in pairs if old != new}
        stated, found = Counter(own.slices), Counter(slices_of(self.function).values())
        if any(old in changed and changed[old] != new for old, new in pairs):
            return None
        if any(stated[old] != found[old] for old in changed):
            return None
        labels = {old: new for (old, _), (new, _) in zip(own.weights, other.weights, strict=True)}
        return replace(self, labels=labels, slices=changed)


def parsed(spec: bytes, *rest: Any) -> Converted:
    """A converted function from its model's bytes, and its other fields."""
    from coremltools.proto import Model_pb2

    return Converted(Model_pb2.Model.FromString(spec), *rest)


def slices_of(function: Any) -> dict[tuple[str, str], Slice]:
    """The slices of a function that cut one axis and leave out its end.

    A key names two constants: the slice's begin and its end. A slice is left out if another op
    reads one of its constants too.
    """
    ops = function.block_specializations[function.opset].operations
    values = {op.outputs[0].name: op.attributes["val"] for op in ops if op.type == "const"}
    read = Counter(argument.name for op in ops for argument in arguments(op))
    found = {}
    for op in ops:
        if op.type != "slice_by_index" or op.inputs.keys() != {"x", "begin", "end", "end_mask"}:
            continue
        names = [op.inputs[key].arguments[0].name for key in ("begin", "end", "end_mask")]
        if any(name not in values or read[name] > 1 for name in names):
            continue
        begin, end, whole = (values[name].immediateValue.tensor for name in names)
        axes = [axis for axis, to_the_end in enumerate(whole.bools.values) if not to_the_end]
        if len(axes) == 1:
            (axis,) = axes
            place = Slice(axis, begin.ints.values[axis], end.ints.values[axis])
            if sum(map(abs, begin.ints.values)) == place.start:
                found[names[0], names[1]] = place
    return found


def arguments(op: Any) -> Iterator[Any]:
    """The arguments of all inputs of an op, protobuf messages."""
    for held in op.inputs.values():
        yield from held.arguments
