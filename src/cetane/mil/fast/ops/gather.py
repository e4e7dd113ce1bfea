"""Reading and writing at computed positions. Negative indices count from the end."""

from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates

_MODES = {"update": "none", "add": "add", "sub": "add", "mul": "mul", "max": "max", "min": "min"}


@translates("gather", ignores=("validate_indices",))
def gather(g: OnnxGraph, x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0) -> str:
    if batch_dims:
        raise ValueError("batch_dims is not supported")
    return g("Gather", x, indices, axis=axis)


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
