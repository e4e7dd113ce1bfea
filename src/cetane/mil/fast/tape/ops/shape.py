"""Ops that arrange elements anew: most are only other strides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cetane.mil.fast.tape.ops.registry import Places, enters
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import Writer
from cetane.mil.shapes import with_kept


@enters("identity")
def identity(w: Writer, x: Place) -> Place:
    return x


@enters("reshape")
def reshape(w: Writer, x: Place, shape: list[int]) -> Place:
    sizes = with_kept(shape, x.shape)
    rest = math.prod(size for size in sizes if size != -1)
    return reshaped(w, x, [x.size // rest if size == -1 else size for size in sizes])


@enters("expand_dims")
def expand_dims(w: Writer, x: Place, axes: list[int]) -> Place:
    rank = len(x.shape) + len(axes)
    new = {axis % rank for axis in axes}
    sizes = iter(x.shape)
    return reshaped(w, x, [1 if axis in new else next(sizes) for axis in range(rank)])


@enters("squeeze")
def squeeze(w: Writer, x: Place, axes: list[int] | None = None) -> Place:
    gone = {axis % len(x.shape) for axis in (range(len(x.shape)) if axes is None else axes)}
    kept = [size for axis, size in enumerate(x.shape) if axis not in gone or size != 1]
    return reshaped(w, x, kept)


@enters("transpose")
def transpose(w: Writer, x: Place, perm: list[int]) -> Place:
    return x.at(0, [x.shape[axis] for axis in perm], [x.strides[axis] for axis in perm])


@enters("split")
def split(
    w: Writer,
    x: Place,
    axis: int,
    num_splits: int | None = None,
    split_sizes: list[int] | None = None,
) -> tuple[Place, ...]:
    size = x.shape[axis]
    if split_sizes is None:
        assert num_splits is not None
        split_sizes = [size // num_splits] * num_splits
    if sum(split_sizes) != size:
        raise Unsupported("parts that are not the whole")
    starts = [sum(split_sizes[:number]) for number in range(len(split_sizes))]
    return tuple(
        part(x, axis, start, size) for start, size in zip(starts, split_sizes, strict=True)
    )


@enters("concat")
def concat(w: Writer, values: Places, axis: int, interleave: bool = False) -> Place:
    if interleave:
        raise Unsupported("a concat that interleaves")
    values = [value if value.shape else value.at(0, (1,), (1,)) for value in values]
    shape = list(values[0].shape)
    shape[axis] = sum(value.shape[axis] for value in values)
    result, start = w.new(shape), 0
    for value in values:
        w.copy(value, part(result, axis, start, value.shape[axis]))
        start += value.shape[axis]
    return result


def part(x: Place, axis: int, start: int, size: int) -> Place:
    """`start : start + size` of one axis."""
    axis %= len(x.shape)
    if not 0 <= start <= start + size <= x.shape[axis]:
        raise Unsupported(f"a part beyond the end of an axis of {x.shape[axis]}")
    shape = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
    return x.at(start * x.strides[axis], shape, x.strides)


def reshaped(w: Writer, x: Place, shape: Sequence[int]) -> Place:
    """The same elements in another shape, copied if there is no other way."""
    if math.prod(shape) != x.size:
        raise Unsupported(f"{x.size} elements in the shape {tuple(shape)}")
    found = x.reshaped(shape)
    if found is None and len(x.shape) > 1 and x.strides[-1] > min(x.strides[:-1]):
        rows = w.transposed(w.new(x.shape))  # rows of tokens stay rows
        if rows.reshaped(shape) is not None:
            return reshaped(w, w.copy(x, rows), shape)
    found = found or w.copy(x, w.new(x.shape)).reshaped(shape)
    assert found is not None
    return found
