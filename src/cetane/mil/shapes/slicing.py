"""Shape rules of slices, their updates and padding."""

from cetane.mil.shapes.rules import KnownOp, Shape, Shapes, Unknown, axis_of, rule


@rule("slice_by_index")
def _slice_by_index(given: KnownOp) -> Shapes:
    return [_sliced(given)]


@rule("slice_update")
def _updated(given: KnownOp) -> Shapes:
    try:
        part, update = _sliced(given), given.shape("update")
    except Unknown:  # positions that a call computes: the reference asks again
        return [given.shape()]
    if update != part:
        raise ValueError(f"an update of {update} does not fit a slice of {part}")
    return [given.shape()]


def _sliced(given: KnownOp) -> Shape:
    x, begin, end = given.shape(), given.values("begin"), given.values("end")
    rank = len(x)
    stride = given.value("stride") or [1] * rank
    masks = [given.value(f"{name}_mask") or [False] * rank for name in ("begin", "end", "squeeze")]
    if any(len(items) != rank for items in (begin, end, stride, *masks)):
        raise ValueError(f"a slice of {rank} axes needs {rank} positions and masks")
    sizes = []
    for axis, size in enumerate(x):
        first = None if masks[0][axis] else begin[axis]
        last = None if masks[1][axis] else end[axis]
        if masks[2][axis]:
            axis_of(first or 0, size)
        elif stride[axis] == 0:
            raise ValueError("a stride is 0")
        else:
            sizes.append(len(range(size)[first : last : stride[axis]]))
    return tuple(sizes)


@rule("slice_by_size")
def _slice_by_size(given: KnownOp) -> Shapes:
    x, begin, size = given.shape(), given.values("begin"), given.values("size")
    if not len(begin) == len(size) == len(x):
        raise ValueError(f"a slice of {len(x)} axes needs as many positions and sizes")
    starts = [axis_of(b, n) if b != n else n for b, n in zip(begin, x, strict=True)]
    taken = [n - b if s == -1 else s for s, b, n in zip(size, starts, x, strict=True)]
    if any(s < 0 or b + s > n for s, b, n in zip(taken, starts, x, strict=True)):
        raise ValueError(f"a slice of {taken} at {starts} is outside {x}")
    return [tuple(taken)]


@rule("pad")
def _pad(given: KnownOp) -> Shapes:
    x, pad = given.shape(), given.values("pad")
    if len(pad) % 2 or len(pad) // 2 > len(x):
        raise ValueError(f"{len(pad)} numbers pad no {len(x)} axes")
    edges = [0] * (2 * len(x) - len(pad)) + pad
    return [tuple(n + edges[2 * a] + edges[2 * a + 1] for a, n in enumerate(x))]
