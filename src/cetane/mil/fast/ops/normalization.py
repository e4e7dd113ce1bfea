"""Normalisations."""

from cetane.mil.fast.context import RMS_NORM
from cetane.mil.fast.onnx_graph import OnnxGraph, Tensor
from cetane.mil.fast.registry import translates


@translates("layer_norm")
def layer_norm(
    g: OnnxGraph,
    x: Tensor,
    axes: list[int] | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> str:
    normalized = {axis % x.rank for axis in (range(x.rank) if axes is None else axes)}
    centred = g("Sub", x, _mean(g, x, sorted(normalized)))
    y = _over_rms(g, centred, sorted(normalized), epsilon)
    shape = [size if axis in normalized else 1 for axis, size in enumerate(x.shape)]
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < x.rank:
        raise ValueError("the sizes of normalised axes must be fixed")
    for kind, factor in (("Mul", gamma), ("Add", beta)):
        if factor is not None:
            y = g(kind, y, g("Reshape", factor, g.ints(sizes)))
    return y


@translates(RMS_NORM)
def rms_norm(
    g: OnnxGraph, x: Tensor, axes: list[int], epsilon: float, gamma: Tensor | None = None
) -> str:
    """Not an op of MIL: `fusion` makes it of a layer_norm of [x, -x]."""
    if gamma is not None and axes == [-1]:
        flat = g("Reshape", gamma, g.ints([-1]))
        return g("SimplifiedLayerNormalization", x, flat, axis=-1, epsilon=epsilon)
    y = _over_rms(g, x, axes, epsilon)
    return y if gamma is None else g("Mul", y, gamma)


@translates("instance_norm")
def instance_norm(
    g: OnnxGraph,
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> str:
    axes = list(range(2, x.rank))
    y = _over_rms(g, g("Sub", x, _mean(g, x, axes)), axes, epsilon)
    return _affine(g, y, x, gamma, beta)


@translates("batch_norm")
def batch_norm(
    g: OnnxGraph,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> str:
    deviation = g("Sqrt", g("Add", _channels(g, variance, x), g.floats(epsilon)))
    y = g("Div", g("Sub", x, _channels(g, mean, x)), deviation)
    return _affine(g, y, x, gamma, beta)


@translates("l2_norm")
def l2_norm(g: OnnxGraph, x: Tensor, epsilon: float = 1e-6) -> str:
    """The norm is over the last three axes."""
    total = g("ReduceSumSquare", x, g.ints([-3, -2, -1]), keepdims=1)
    return g("Div", x, g("Sqrt", g("Add", total, g.floats(epsilon))))


def _over_rms(g: OnnxGraph, x: Tensor | str, axes: list[int], epsilon: float) -> str:
    mean_square = _mean(g, g("Mul", x, x), axes)
    return g("Div", x, g("Sqrt", g("Add", mean_square, g.floats(epsilon))))


def _mean(g: OnnxGraph, x: Tensor | str, axes: list[int]) -> str:
    return g("ReduceMean", x, g.ints(axes), keepdims=1)


def _affine(g: OnnxGraph, y: str, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> str:
    if gamma is not None:
        y = g("Mul", y, _channels(g, gamma, x))
    return y if beta is None else g("Add", y, _channels(g, beta, x))


def _channels(g: OnnxGraph, vector: Tensor, x: Tensor) -> str:
    """A vector shaped to broadcast along the second axis of `x`."""
    return g("Reshape", vector, g.ints([-1] + [1] * (x.rank - 2)))
