"""Elements at indices."""

from __future__ import annotations

import math

from cetane.mil.fast.tape.code import Opcode
from cetane.mil.fast.tape.ops.registry import enters
from cetane.mil.fast.tape.ops.shape import part, reshaped
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import Writer
from cetane.mil.program import Argument

SPANS = 2
"""The most runs of elements that a gather copies one by one: two halves that change places are
two."""


@enters("gather", ignores=("validate_indices",))
def gather(w: Writer, x: Place, indices: Argument, axis: int = 0, batch_dims: int = 0) -> Place:
    axis %= len(x.shape)
    spans = _spans(w, indices) if not batch_dims else []
    if 0 < len(spans) <= SPANS:
        shape = (*x.shape[:axis], sum(size for _, size in spans), *x.shape[axis + 1 :])
        result, at = w.new(shape, x), 0
        for start, size in spans:
            w.copy(part(x, axis, start, size), part(result, axis, at, size))
            at += size
        return result
    return _picked(w, x, w.place(indices), axis, batch_dims)


def _spans(w: Writer, indices: Argument) -> list[tuple[int, int]]:
    """Starts and sizes of the runs of a constant list of indices; none for others."""
    given = w.constants.plain(indices) if indices in w.constants else None
    if not isinstance(given, list) or any(not isinstance(n, int) or n < 0 for n in given):
        return []
    spans: list[tuple[int, int]] = []
    for index in given:
        if spans and index == sum(spans[-1]):
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((index, 1))
    return spans


def _picked(w: Writer, x: Place, indices: Place, axis: int, batch_dims: int) -> Place:
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    sizes = [math.prod(before), x.shape[axis], math.prod(after)]
    joined = x.reshaped(sizes)
    if batch_dims or len(indices.shape) > 1:
        raise Unsupported("a gather along several axes")
    joined = joined or reshaped(w, x, sizes)
    result = w.new((*before, *indices.shape, *after))
    strides = (joined.strides[2], joined.strides[0], joined.strides[1])
    parameters = (sizes[0], indices.size, sizes[2], *strides, sizes[1])
    return w.emit(
        Opcode.PICK, result, joined, w.contiguous(indices), parameters=parameters, shared=False
    )
