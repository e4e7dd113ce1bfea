"""Reductions, scans and sorting along axes."""

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates

_REDUCTIONS = {
    "reduce_sum": ("ReduceSum", True),
    "reduce_max": ("ReduceMax", True),
    "reduce_min": ("ReduceMin", True),
    "reduce_prod": ("ReduceProd", True),
    "reduce_mean": ("ReduceMean", False),
    "reduce_l1_norm": ("ReduceL1", False),
    "reduce_l2_norm": ("ReduceL2", False),
    "reduce_sum_square": ("ReduceSumSquare", False),
    "reduce_log_sum": ("ReduceLogSum", False),
    "reduce_log_sum_exp": ("ReduceLogSumExp", False),
}
"""Kinds of reduction, and whether an integer result needs no fraction on the way."""


def _reduction(kind: str, onnx_kind: str, integer: bool) -> None:
    @translates(kind)
    def translate(
        g: OnnxGraph, x: Tensor, axes: list[int] | None = None, keep_dims: bool = False
    ) -> str:
        axes = list(range(x.rank)) if axes is None else axes
        if x.is_float or integer:
            y = g(onnx_kind, x, g.ints(axes), keepdims=int(keep_dims))
            if x.is_float and onnx_kind in ("ReduceMax", "ReduceMin"):  # which skip NaN
                unknown = g("Where", g("IsNaN", x), x, g.floats(0))
                y = g("Add", y, g("ReduceSum", unknown, g.ints(axes), keepdims=int(keep_dims)))
            return y
        y = g(onnx_kind, g.cast(x, "fp32"), g.ints(axes), keepdims=int(keep_dims))
        return g.cast(y, x.dtype)


for _kind, (_onnx_kind, _integer) in _REDUCTIONS.items():
    _reduction(_kind, _onnx_kind, _integer)


@translates("reduce_argmax", ignores=("output_dtype",))
def reduce_argmax(g: OnnxGraph, x: Tensor, axis: int = -1, keep_dims: bool = False) -> str:
    return g.cast(g("ArgMax", x, axis=axis, keepdims=int(keep_dims)), "int32")


@translates("reduce_argmin", ignores=("output_dtype",))
def reduce_argmin(g: OnnxGraph, x: Tensor, axis: int = -1, keep_dims: bool = False) -> str:
    return g.cast(g("ArgMin", x, axis=axis, keepdims=int(keep_dims)), "int32")


@translates("cumsum")
def cumsum(
    g: OnnxGraph, x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False
) -> str:
    return g("CumSum", x, g.ints(axis), exclusive=int(exclusive), reverse=int(reverse))


@translates("argsort")
def argsort(g: OnnxGraph, x: Tensor, axis: int = -1, ascending: bool = False) -> str:
    return _sorted(g, x, -1, axis, ascending)[1]


@translates("topk", ignores=("sort", "output_indices_dtype"))
def topk(
    g: OnnxGraph,
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    return_indices: bool = True,
) -> str | tuple[str, ...]:
    values, indices = _sorted(g, x, k, axis, ascending)
    return (values, indices) if return_indices else values


def _sorted(g: OnnxGraph, x: Tensor, k: int, axis: int, ascending: bool) -> tuple[str, str]:
    """The first `k` elements in order (-1 for all), and their positions before."""
    axis %= x.rank
    count = g("Shape", x, start=axis, end=axis + 1) if k == -1 else g.ints([k])
    values, indices = g.several("TopK", (x, count), 2, axis=axis, largest=int(not ascending))
    return values, g.cast(indices, "int32")
