"""Reading and writing at computed positions. Negative indices count from the end."""

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates

_MODES = {"update": "none", "add": "add", "sub": "add", "mul": "mul", "max": "max", "min": "min"}


@translates("gather", ignores=("validate_indices",))
def gather(g: OnnxGraph, x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0) -> str:
    if batch_dims:
        return _by_batch(g, x, indices, axis % x.rank, batch_dims)
    return g("Gather", x, indices, axis=axis)


def _by_batch(g: OnnxGraph, x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> str:
    """Every member of a batch has its own indices. ONNX takes them from the first axis after the
    batch's, so the gathered axis moves there, and the axes of the indices move back."""
    others = [a for a in range(x.rank) if a != axis]
    order = [*others[:batch_dims], axis, *others[batch_dims:]]
    at = g("Unsqueeze", g.indices(indices), g.ints([-1]))
    taken = g("GatherND", g("Transpose", x, perm=order), at, batch_dims=batch_dims)
    first = list(range(indices.rank))  # the axes of the batch and of its indices
    rest = list(range(indices.rank, indices.rank + x.rank - 1 - batch_dims))
    batch, own, between = first[:batch_dims], first[batch_dims:], axis - batch_dims
    return g("Transpose", taken, perm=[*batch, *rest[:between], *own, *rest[between:]])


@translates("gather_along_axis", ignores=("validate_indices",))
def gather_along_axis(g: OnnxGraph, x: Tensor, indices: Tensor, axis: int = 0) -> str:
    return g("GatherElements", x, indices, axis=axis)


@translates("gather_nd", ignores=("validate_indices",))
def gather_nd(g: OnnxGraph, x: Tensor, indices: Tensor, batch_dims: int = 0) -> str:
    return g("GatherND", x, g.indices(indices), batch_dims=batch_dims)


@translates("scatter", ignores=("validate_indices",))
def scatter(
    g: OnnxGraph, data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> str:
    axis %= data.rank
    column = g("Reshape", indices, g.ints([-1] + [1] * (data.rank - axis - 1)))
    along = g("Expand", column, g("Shape", updates))
    values = _values(g, updates, mode)
    return g("ScatterElements", data, along, values, axis=axis, reduction=_reduction(mode))


@translates("scatter_along_axis", ignores=("validate_indices",))
def scatter_along_axis(
    g: OnnxGraph, data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add"
) -> str:
    values = _values(g, updates, mode)
    return g("ScatterElements", data, indices, values, axis=axis, reduction=_reduction(mode))


@translates("scatter_nd", ignores=("validate_indices",))
def scatter_nd(
    g: OnnxGraph, data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add"
) -> str:
    values = _values(g, updates, mode)
    return g("ScatterND", data, g.indices(indices), values, reduction=_reduction(mode))


def _values(g: OnnxGraph, updates: Tensor, mode: str) -> str:
    return g("Neg", updates) if mode == "sub" else updates.name


def _reduction(mode: str) -> str:
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} is not supported")
    return _MODES[mode]
