"""Shape rules of reductions."""

from cetane.mil.shapes.rules import KnownOp, Shapes, axis_of, rule


@rule(
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_l1_norm",
    "reduce_l2_norm", "reduce_sum_square", "reduce_log_sum", "reduce_log_sum_exp",
)  # fmt: skip
def _reduce(given: KnownOp) -> Shapes:
    x, axes = given.shape(), given.value("axes")
    gone = {axis_of(a, len(x)) for a in (range(len(x)) if axes is None else axes)}
    if given.value("keep_dims", False):
        return [tuple(1 if axis in gone else size for axis, size in enumerate(x))]
    return [tuple(size for axis, size in enumerate(x) if axis not in gone)]


@rule("reduce_argmax", "reduce_argmin")
def _argument(given: KnownOp) -> Shapes:
    x = given.shape()
    gone = axis_of(given.value("axis", -1), len(x))
    kept = (1,) if given.value("keep_dims", False) else ()
    return [(*x[:gone], *kept, *x[gone + 1 :])]


@rule("topk")
def _topk(given: KnownOp) -> Shapes:
    x, count = given.shape(), given.value("k", 1)
    axis = axis_of(given.value("axis", -1), len(x))
    count = x[axis] if count == -1 else count
    if not 0 < count <= x[axis]:
        raise ValueError(f"{x[axis]} elements have no {count} largest")
    best = (*x[:axis], count, *x[axis + 1 :])
    return [best, best] if given.value("return_indices", True) else [best]
