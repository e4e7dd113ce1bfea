"""Ops that move elements without changing them."""

from cetane.errors import CetaneError
from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.ops.slicing import FIRST, LAST
from cetane.mil.fast.registry import Ints, Tensors, translates
from cetane.mil.program import SizeRange
from cetane.mil.shapes import with_kept


@translates("identity")
def identity(g: OnnxGraph, x: Tensor) -> str:
    return g("Identity", x)


@translates("shape")
def shape(g: OnnxGraph, x: Tensor) -> str:
    return g.cast(g("Shape", x), "int32")


@translates("reshape")
def reshape(g: OnnxGraph, x: Tensor, shape: Ints) -> str:
    """-1 takes the remaining elements. ONNX counts the axes of 0 from the first."""
    if isinstance(shape, list) and 0 in shape:
        sizes = [size for size in x.shape if isinstance(size, int)]
        if len(sizes) < x.rank:
            raise CetaneError("a size that is kept must be fixed")
        shape = with_kept(shape, sizes)
    return g("Reshape", x, g.indices(shape))


@translates("expand_dims")
def expand_dims(g: OnnxGraph, x: Tensor, axes: list[int]) -> str:
    return g("Unsqueeze", x, g.ints(axes))


@translates("squeeze")
def squeeze(g: OnnxGraph, x: Tensor, axes: list[int] | None = None) -> str:
    """Only axes of size 1 are removed; a named axis of unknown size must have it."""
    named = range(x.rank) if axes is None else axes
    ones = [a for a in named if x.shape[a] == 1 or (axes and isinstance(x.shape[a], SizeRange))]
    return g("Squeeze", x, g.ints(ones))


@translates("flatten2d")
def flatten2d(g: OnnxGraph, x: Tensor, axis: int = 1) -> str:
    return g("Flatten", x, axis=axis)


@translates("transpose")
def transpose(g: OnnxGraph, x: Tensor, perm: list[int]) -> str:
    return g("Transpose", x, perm=[axis % x.rank for axis in perm])


@translates("reverse")
def reverse(g: OnnxGraph, x: Tensor, axes: list[int] | None = None) -> str:
    axes = list(range(x.rank)) if axes is None else axes
    count = len(axes)
    return g(
        "Slice",
        x,
        g.ints([LAST] * count),
        g.ints([FIRST] * count),
        g.ints(axes),
        g.ints([-1] * count),
    )


@translates("tile")
def tile(g: OnnxGraph, x: Tensor, reps: list[int]) -> str:
    """Only the reference bounds repetitions that a call computes."""
    return g("Tile", x, g.ints(reps))


@translates("concat")
def concat(g: OnnxGraph, values: Tensors, axis: int, interleave: bool = False) -> str:
    if interleave:
        axis %= values[0].rank
        stacked = stack(g, values, axis + 1)
        before = g("Shape", values[0], end=axis)
        after = g("Shape", values[0], start=axis + 1)
        return g("Reshape", stacked, g("Concat", before, g.ints([-1]), after, axis=0))
    joined = [value if value.rank else g("Unsqueeze", value, g.ints([0])) for value in values]
    return g("Concat", *joined, axis=axis)


@translates("stack")
def stack(g: OnnxGraph, values: Tensors, axis: int) -> str:
    return g("Concat", *(g("Unsqueeze", v, g.ints([axis])) for v in values), axis=axis)


@translates("split")
def split(
    g: OnnxGraph,
    x: Tensor,
    axis: int,
    num_splits: int | None = None,
    split_sizes: list[int] | None = None,
) -> tuple[str, ...]:
    if split_sizes is None:
        size = x.shape[axis]
        if num_splits is None or not isinstance(size, int) or size % num_splits:
            raise ValueError(f"cannot split {size} elements into {num_splits} equal parts")
        split_sizes = [size // num_splits] * num_splits
    return g.several("Split", (x, g.ints(split_sizes)), len(split_sizes), axis=axis)
