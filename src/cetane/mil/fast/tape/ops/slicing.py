"""Slices and their updates."""

from __future__ import annotations

from cetane.mil.fast.context import VIEW
from cetane.mil.fast.tape.code import MOST_AXES, Opcode
from cetane.mil.fast.tape.ops.registry import enters
from cetane.mil.fast.tape.ops.shape import part
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import Writer
from cetane.mil.program import Argument

Mask = list[bool] | None


@enters(VIEW)
def view(w: Writer, x: Place, begin: int, end: int) -> Place:
    return part(x, 0, begin, end - begin)


@enters("slice_by_index")
def slice_by_index(
    w: Writer,
    x: Place,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Place:
    offset = 0
    shape, strides = [], []
    for axis, size in enumerate(x.shape):
        step = stride[axis] if stride else 1
        first = None if begin_mask and begin_mask[axis] else begin[axis]
        last = None if end_mask and end_mask[axis] else end[axis]
        if squeeze_mask and squeeze_mask[axis]:
            first = first or 0
            if not -size <= first < size:
                raise Unsupported(f"an index beyond the end of an axis of {size}")
            offset += first % size * x.strides[axis]
            continue
        taken = range(size)[first:last:step]
        if not taken:
            raise Unsupported("an empty slice")
        offset += taken[0] * x.strides[axis]
        shape.append(len(taken))
        strides.append(step * x.strides[axis])
    return x.at(offset, shape, strides)


@enters("slice_update", ignores=("end", "end_mask"))
def slice_update(
    w: Writer,
    x: Argument,
    update: Place,
    begin: Place,
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Place:
    """The shape of the update gives the end of the slice."""
    if any(step != 1 for step in stride or ()) or any(squeeze_mask or ()):
        raise Unsupported("an update with steps")
    if len(update.shape) > MOST_AXES:
        raise Unsupported(f"an update along more than {MOST_AXES} axes")
    result, update = w.own(x), w.contiguous(update)
    parameters = [len(result.shape)]
    for axis, (size, own) in enumerate(zip(result.shape, update.shape, strict=True)):
        parameters += [size, own, int(not (begin_mask and begin_mask[axis]))]
    return w.emit(
        Opcode.UPDATE, result, update, w.contiguous(begin), parameters=parameters, shared=False
    )
