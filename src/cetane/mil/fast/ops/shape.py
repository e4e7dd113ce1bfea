"""Ops that move elements without changing them."""

from cetane.mil.fast.graph import Graph, Tensor
from cetane.mil.fast.ops.slicing import FIRST, LAST
from cetane.mil.fast.registry import Ints, Tensors, lowers


@lowers("identity")
def identity(g: Graph, x: Tensor) -> str:
    return g("Identity", x)


@lowers("shape")
def shape(g: Graph, x: Tensor) -> str:
    return g.cast(g("Shape", x), "int32")


@lowers("reshape")
def reshape(g: Graph, x: Tensor, shape: Ints) -> str:
    """0 keeps a dimension, -1 takes what is left, as in ONNX."""
    return g("Reshape", x, g.indices(shape))


@lowers("expand_dims")
def expand_dims(g: Graph, x: Tensor, axes: list[int]) -> str:
    return g("Unsqueeze", x, g.ints(axes))


@lowers("squeeze")
def squeeze(g: Graph, x: Tensor, axes: list[int] | None = None) -> str:
    """Axes longer than one stay."""
    axes = list(range(x.rank)) if axes is None else axes
    return g("Squeeze", x, g.ints([axis for axis in axes if x.shape[axis] == 1]))


@lowers("flatten2d")
def flatten2d(g: Graph, x: Tensor, axis: int = 1) -> str:
    return g("Flatten", x, axis=axis)


@lowers("transpose")
def transpose(g: Graph, x: Tensor, perm: list[int]) -> str:
    return g("Transpose", x, perm=[axis % x.rank for axis in perm])


@lowers("reverse")
def reverse(g: Graph, x: Tensor, axes: list[int] | None = None) -> str:
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


@lowers("tile")
def tile(g: Graph, x: Tensor, reps: Ints) -> str:
    return g("Tile", x, g.indices(reps))


@lowers("concat")
def concat(g: Graph, values: Tensors, axis: int, interleave: bool = False) -> str:
    if interleave:
        axis %= values[0].rank
        stacked = stack(g, values, axis + 1)
        before = g("Shape", values[0], end=axis)
        after = g("Shape", values[0], start=axis + 1)
        return g("Reshape", stacked, g("Concat", before, g.ints([-1]), after, axis=0))
    joined = [value if value.rank else g("Unsqueeze", value, g.ints([0])) for value in values]
    return g("Concat", *joined, axis=axis)


@lowers("stack")
def stack(g: Graph, values: Tensors, axis: int) -> str:
    return g("Concat", *(g("Unsqueeze", v, g.ints([axis])) for v in values), axis=axis)


@lowers("split")
def split(
    g: Graph,
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
