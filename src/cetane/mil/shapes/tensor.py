"""Shape rules of ops whose values make new tensors."""

import math

from cetane.mil.shapes.rules import KnownOp, Shapes, Unknown, axis_of, bounded, rule


@rule("fill")
def _fill(given: KnownOp) -> Shapes:
    return [tuple(given.values("shape"))]


@rule("fill_like")
def _fill_like(given: KnownOp) -> Shapes:
    return [given.shape("ref_tensor")]


@rule("one_hot")
def _one_hot(given: KnownOp) -> Shapes:
    indices, size = given.shape("indices"), given.values("one_hot_vector_size")[0]
    axis = axis_of(given.value("axis", -1), len(indices) + 1)
    return [(*indices[:axis], size, *indices[axis:])]


@rule("range_1d")
def _range_1d(given: KnownOp) -> Shapes:
    start, end, step = (given.value(name) for name in ("start", "end", "step"))
    if None in (start, end, step):
        raise Unknown
    if not step or not all(map(math.isfinite, (start, end, step))):
        raise ValueError(f"no range goes from {start} to {end} by {step}")
    return [(max(0, math.ceil((end - start) / step)),)]


@rule("non_zero")
def _non_zero(given: KnownOp) -> Shapes:
    """How many there are, no shape says; at most all."""
    x = given.shape()
    bounded((math.prod(x), len(x)))
    raise Unknown


@rule("make_list")
def _make_list(given: KnownOp) -> Shapes:
    bounded(given.values("init_length") if "init_length" in given.op.inputs else [1])
    return None


@rule("random_uniform", "random_normal", "random_bernoulli")
def _random(given: KnownOp) -> Shapes:
    bounded(given.values("shape"))
    return None


@rule("random_categorical")
def _drawn(given: KnownOp) -> Shapes:
    bounded([*given.shape()[:-1], given.value("size", 1)])
    return None
