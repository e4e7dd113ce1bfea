"""Shape rules of ops that arrange elements anew."""

import math
from collections.abc import Sequence

from cetane.mil.shapes.rules import KnownOp, Shapes, axis_of, rule


@rule("reshape")
def _reshape(given: KnownOp) -> Shapes:
    x, wanted = given.shape(), given.values("shape")
    sizes = with_kept(wanted, x)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest <= 0 or math.prod(x) % rest:
            raise ValueError(f"{x} cannot be reshaped to {tuple(wanted)}")
        sizes[sizes.index(-1)] = math.prod(x) // rest
    if any(size < 0 for size in sizes) or math.prod(sizes) != math.prod(x):
        raise ValueError(f"{x} cannot be reshaped to {tuple(wanted)}")
    return [tuple(sizes)]


def with_kept(wanted: Sequence[int], x: Sequence[int]) -> list[int]:
    """The sizes of a reshape of a tensor of sizes `x` to `wanted`; a -1 stays.

    A 0 keeps the size of the axis that is equally far from the last one. Where `x` has no such
    axis, a 0 means 1. Before iOS 17 both shapes have equally many axes, so counting from the first
    axis gives the same.
    """
    kept = [1] * len(wanted) + list(x)
    return [size or kept[at - len(wanted)] for at, size in enumerate(wanted)]


@rule("transpose")
def _transpose(given: KnownOp) -> Shapes:
    x, perm = given.shape(), given.values("perm")
    axes = [axis_of(axis, len(x)) for axis in perm]
    if sorted(axes) != list(range(len(x))):
        raise ValueError(f"{perm} is no order of {len(x)} axes")
    return [tuple(x[axis] for axis in axes)]


@rule("expand_dims")
def _expand_dims(given: KnownOp) -> Shapes:
    x, axes = list(given.shape()), given.values("axes")
    for axis in sorted(axis_of(axis, len(x) + len(axes)) for axis in axes):
        x.insert(axis, 1)
    return [tuple(x)]


@rule("squeeze")
def _squeeze(given: KnownOp) -> Shapes:
    x = given.shape()
    axes = given.value("axes")
    axes = range(len(x)) if axes is None else axes
    gone = {axis_of(axis, len(x)) for axis in axes}
    return [tuple(size for axis, size in enumerate(x) if axis not in gone or size != 1)]


@rule("concat")
def _concat(given: KnownOp) -> Shapes:
    parts = [shape or (1,) for shape in given.shapes("values")]
    first, axis = parts[0], axis_of(given.value("axis"), len(parts[0]))
    before, after = first[:axis], first[axis + 1 :]
    for part in parts:
        if len(part) != len(first) or (part[:axis], part[axis + 1 :]) != (before, after):
            raise ValueError(f"{part} cannot be joined with {first} along axis {axis}")
    return [(*before, sum(part[axis] for part in parts), *after)]


@rule("stack")
def _stack(given: KnownOp) -> Shapes:
    parts = given.shapes("values")
    if len(set(parts)) > 1:
        raise ValueError("tensors of different shapes cannot be stacked")
    axis = axis_of(given.value("axis"), len(parts[0]) + 1)
    return [(*parts[0][:axis], len(parts), *parts[0][axis:])]


@rule("split")
def _split(given: KnownOp) -> Shapes:
    x = given.shape()
    axis = axis_of(given.value("axis"), len(x))
    sizes = given.value("split_sizes")
    if sizes is None:
        count = given.values("num_splits")[0]
        if not 0 < count <= x[axis] or x[axis] % count:
            raise ValueError(f"cannot split {x[axis]} elements into {count} equal parts")
        sizes = [x[axis] // count] * count
    if any(size < 0 for size in sizes) or sum(sizes) != x[axis]:
        raise ValueError(f"cannot split {x[axis]} elements into {sizes}")
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


@rule("tile")
def _tile(given: KnownOp) -> Shapes:
    x, reps = given.shape(), given.values("reps")
    if len(reps) != len(x) or any(count < 0 for count in reps):
        raise ValueError(f"{reps} are no repetitions of {len(x)} axes")
    return [tuple(size * count for size, count in zip(x, reps, strict=True))]


@rule("sliding_windows")
def _sliding_windows(given: KnownOp) -> Shapes:
    x, size, stride = given.shape(), given.values("size")[0], given.value("stride", 1)
    axis = axis_of(given.value("axis"), len(x))
    if not 1 <= size <= x[axis] or stride < 1:
        raise ValueError(f"windows of {size} every {stride} do not fit {x}")
    return [(*x[:axis], (x[axis] - size) // stride + 1, size, *x[axis + 1 :])]
