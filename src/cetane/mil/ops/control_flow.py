"""Branches and loops. A body takes and returns lists of tensors."""

from torch import Tensor

from cetane.mil.ops.registry import Bodies, Tensors, op


@op("cond")
def cond(pred: bool, bodies: Bodies) -> tuple[Tensor, ...]:
    when_true, when_false = bodies
    return tuple((when_true if pred else when_false)([]))


@op("while_loop")
def while_loop(loop_vars: Tensors, bodies: Bodies) -> tuple[Tensor, ...]:
    condition, body = bodies
    while condition(loop_vars)[0]:
        loop_vars = body(loop_vars)
    return tuple(loop_vars)
