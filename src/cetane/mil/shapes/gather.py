"""Shape rules of ops that read or write at indices."""

from cetane.mil.shapes.rules import KnownOp, Shapes, axis_of, rule


@rule("gather")
def _gather(given: KnownOp) -> Shapes:
    x, indices = given.shape(), given.shape("indices")
    axis = axis_of(given.value("axis", 0), len(x))
    batch = given.value("batch_dims", 0)
    if not 0 <= batch <= min(axis, len(indices)):
        raise ValueError(f"{batch} axes are no batch of {indices}")
    return [(*x[:axis], *indices[batch:], *x[axis + 1 :])]


@rule("gather_nd")
def _gather_nd(given: KnownOp) -> Shapes:
    x, indices = given.shape(), given.shape("indices")
    batch = given.value("batch_dims") or 0
    return [(*indices[:-1], *x[batch + indices[-1] :])]


@rule("gather_along_axis")
def _gather_along_axis(given: KnownOp) -> Shapes:
    return [given.shape("indices")]


@rule("scatter", "scatter_along_axis", "scatter_nd")
def _scattered(given: KnownOp) -> Shapes:
    return [given.shape("data")]
