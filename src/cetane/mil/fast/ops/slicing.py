"""Reading and writing rectangular parts of a tensor, and padding around one."""

import math

import numpy as np

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import Ints, translates

Mask = list[bool] | None

LAST, FIRST = 2**63 - 1, -(2**63)
"""Beyond every axis: ONNX clamps positions to it."""


@translates("slice_by_index")
def slice_by_index(
    g: OnnxGraph,
    x: Tensor,
    begin: Ints,
    end: Ints,
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> str:
    axes = range(x.rank)
    steps = stride or [1] * x.rank
    squeezed = [axis for axis in axes if squeeze_mask and squeeze_mask[axis]]
    steps = [1 if axis in squeezed else steps[axis] for axis in axes]
    first = [axis for axis in axes if begin_mask and begin_mask[axis]]
    last = [axis for axis in axes if end_mask and end_mask[axis] and axis not in squeezed]
    if isinstance(end, list):
        # The end of any axis, without its size: functions of other sizes become equal graphs.
        last += [a for a in axes if steps[a] > 0 and end[a] == x.shape[a] and a not in squeezed]
    starts = _masked(g, begin, {axis: 0 if steps[axis] > 0 else LAST for axis in first})
    ends = _masked(g, end, {axis: LAST if steps[axis] > 0 else FIRST for axis in last})
    if squeezed:
        after = g("Add", starts, g.ints(1))
        after = g("Where", g("Equal", after, g.ints(0)), g.ints(LAST), after)
        ends = g("Where", g.bools([axis in squeezed for axis in axes]), after, ends)
    y = g("Slice", x, starts, ends, g.ints(list(axes)), g.ints(steps))
    return g("Squeeze", y, g.ints(squeezed)) if squeezed else y


@translates("slice_update", ignores=("end", "end_mask"))
def slice_update(
    g: OnnxGraph,
    x: Tensor,
    update: Tensor,
    begin: Ints,
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> str:
    """Scatter the update into the flat tensor: onnxruntime does only this form in place.

    The shape of the update gives the end of the slice.
    """
    squeezed = [axis for axis in range(x.rank) if squeeze_mask and squeeze_mask[axis]]
    update = _unsqueezed(g, update, squeezed)
    steps = [1 if a in squeezed else step for a, step in enumerate(stride or [1] * x.rank)]
    sizes = [size for size in x.shape if isinstance(size, int)]
    if len(sizes) < x.rank or update.rank != x.rank:
        raise ValueError("tensor and update must have fixed shapes of the same rank")
    if min(steps) < 0:
        raise ValueError("only forward strides are supported")
    starts = _masked(g, begin, {a: 0 for a in range(x.rank) if begin_mask and begin_mask[a]})
    from_end = g("Less", starts, g.ints(0))
    starts = g("Where", from_end, g("Add", starts, g.ints(sizes)), starts)
    # ScatterElements refuses a position beyond the tensor, but not a position in the next row.
    last = g("Add", starts, g("Mul", g("Sub", g("Shape", update), g.ints(1)), g.ints(steps)))
    fits = g("Less", last, g.ints(sizes))
    starts = g("Where", fits, starts, g.ints(math.prod(sizes)))
    positions = _flat_positions(g, starts, steps, sizes, update)
    flat = g.ints([-1])
    updated = g(
        "ScatterElements",
        g("Reshape", x, flat),
        g("Reshape", positions, flat),
        g("Reshape", update, flat),
        axis=0,
    )
    return g("Reshape", updated, g.ints(sizes))


def _flat_positions(
    g: OnnxGraph, starts: str, steps: list[int], sizes: list[int], update: Tensor
) -> str:
    """The position of each element of an update in the flat tensor, in the update's shape."""
    rank = len(sizes)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(rank)]
    positions = g("ReduceSum", g("Mul", starts, g.ints(strides)), keepdims=0)
    offsets = np.zeros([1] * rank, np.int64)
    for axis, size in enumerate(update.shape):
        factor, column = steps[axis] * strides[axis], [-1] + [1] * (rank - axis - 1)
        if isinstance(size, int):
            offsets = offsets + factor * np.arange(size).reshape(column)
        else:
            count = g("Squeeze", g("Shape", update, start=axis, end=axis + 1))
            along = g("Mul", g("Range", g.ints(0), count, g.ints(1)), g.ints(factor))
            positions = g("Add", positions, g("Reshape", along, g.ints(column)))
    return g("Add", positions, g.literal(offsets))


def _unsqueezed(g: OnnxGraph, x: Tensor, axes: list[int]) -> Tensor:
    """A tensor with axes of size 1 added."""
    if not axes:
        return x
    shape = list(x.shape)
    for axis in axes:
        shape.insert(axis, 1)
    return Tensor(g("Unsqueeze", x, g.ints(axes)), tuple(shape), x.dtype)


@translates("slice_by_size")
def slice_by_size(g: OnnxGraph, x: Tensor, begin: Ints, size: list[int]) -> str:
    """A size of -1 takes all elements up to the end."""
    starts = g.indices(begin)
    starts = g("Where", g("Less", starts, g.ints(0)), g("Add", starts, g("Shape", x)), starts)
    rest = {axis: LAST for axis, count in enumerate(size) if count == -1}
    ends = _replaced(g, g("Add", starts, g.ints(size)), rest, len(size))
    return g("Slice", x, starts, ends, g.ints(list(range(x.rank))))


@translates("pad")
def pad(
    g: OnnxGraph, x: Tensor, pad: list[int], mode: str = "constant", constant_val: float = 0.0
) -> str:
    """`pad` holds the padding before and after each of the last axes, in their order."""
    count = len(pad) // 2
    onnx_mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}[mode]
    return g(
        "Pad",
        x,
        g.ints([*pad[::2], *pad[1::2]]),
        g.like(constant_val, x),
        g.ints(list(range(x.rank - count, x.rank))),
        mode=onnx_mode,
    )


def _masked(g: OnnxGraph, positions: Ints, fixed: dict[int, int]) -> str:
    """Positions as int64, with those of some axes replaced."""
    if isinstance(positions, list):
        return g.ints([fixed.get(axis, position) for axis, position in enumerate(positions)])
    rank = positions.shape[0]
    assert isinstance(rank, int)
    return _replaced(g, g.indices(positions), fixed, rank)


def _replaced(g: OnnxGraph, positions: str, fixed: dict[int, int], rank: int) -> str:
    if not fixed:
        return positions
    values = g.ints([fixed.get(axis, 0) for axis in range(rank)])
    return g("Where", g.bools([axis in fixed for axis in range(rank)]), values, positions)
