"""Tensors made from parameters, or selected by conditions.

`fill` and `range_1d` have no translation: with known sizes they are constants, and only the
reference bounds sizes that a call computes."""

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates


@translates("fill_like")
def fill_like(g: OnnxGraph, ref_tensor: Tensor, value: Tensor | None = None) -> str:
    return g("Expand", g.floats(0) if value is None else value, g("Shape", ref_tensor))


@translates("one_hot")
def one_hot(
    g: OnnxGraph,
    indices: Tensor,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: Tensor | None = None,
    off_value: Tensor | None = None,
) -> str:
    axis %= indices.rank + 1
    size, after = one_hot_vector_size, indices.rank - axis
    classes = g("Reshape", g.indices(list(range(size))), g.ints([size] + [1] * after))
    hit = g("Equal", g("Unsqueeze", g.indices(indices), g.ints([axis])), classes)
    on, off = on_value or indices, off_value or indices
    return g("Where", hit, on_value or g.like(1, off), off_value or g.like(0, on))


@translates("band_part")
def band_part(g: OnnxGraph, x: Tensor, lower: int = -1, upper: int = -1) -> str:
    """Zero outside the band; a negative bound keeps its whole triangle."""
    y: Tensor | str = x
    if lower >= 0:
        y = g("Trilu", y, g.ints(-lower), upper=1)
    return g("Trilu", y, g.ints(upper), upper=0) if upper >= 0 else g("Identity", y)


@translates("non_zero")
def non_zero(g: OnnxGraph, x: Tensor) -> str:
    return g.cast(g("Transpose", g("NonZero", x), perm=[1, 0]), "int32")


@translates("select")
def select(g: OnnxGraph, cond: Tensor, a: Tensor, b: Tensor) -> str:
    return g("Where", cond, a, b)
