"""Rewrites of attention over caches of 8 bits: it becomes attention over floats. Each is shown as
`before -> after`; see `fusion`.

A graph multiplies scores and weights by the scales of keys and values, since a product for each
element costs an ANE more. Here a cache is widened, so `attention_rewrites` finds attention as it is
elsewhere. A tape widens only the slots that the mask shows.
"""

from __future__ import annotations

import numpy as np

from cetane.mil.fast.context import WIDENED, Context, constant, factored, new_op
from cetane.mil.program import Argument, NamedValue, Op, TensorType


def rounded_keys(context: Context, op: Op) -> list[Op] | None:
    """Scale keys in place of their scores.

    mul(matmul(rows, codes), scales)  ->  matmul(rows, widened keys)
    """
    if op.kind != "mul":
        return None
    for product, factor in (("x", "y"), ("y", "x")):
        matmul = context.producer(op.inputs[product][0], "matmul")
        if matmul is None or any(context.plain(matmul, f"transpose_{n}") for n in "xy"):
            continue
        name = f"{op.outputs[0].name}:keys"
        ops = _widened(context, matmul.inputs["y"][0], op.inputs[factor][0], name)
        if ops is not None:
            given = {**matmul.inputs, "y": (name,)}
            return [*ops, Op("matmul", op.name, given, op.outputs)]
    return None


def rounded_values(context: Context, op: Op) -> list[Op] | None:
    """Scale values in place of their weights. The program divides the scales by their mean first,
    and multiplies the result by it.

        mul(mul(matmul(mul(weights, real_div(scales, mean)), codes^T), number), mean)
        ->  mul(matmul(weights, widened values^T), number)
    """
    if op.kind != "mul":
        return None
    for product, factor in (("x", "y"), ("y", "x")):
        mean = op.inputs[factor]
        mixed, number = factored(context, op.inputs[product][0])
        matmul = context.producer(mixed, "matmul")
        if matmul is None or not context.plain(matmul, "transpose_y"):
            continue
        shares = context.producer(matmul.inputs["x"][0], "mul")
        for weights, ratio in (("x", "y"), ("y", "x")):
            division = shares and context.producer(shares.inputs[ratio][0], "real_div")
            if shares is None or division is None or division.inputs["y"] != mean:
                continue
            (codes,), (scales,) = matmul.inputs["y"], division.inputs["x"]
            name, result = op.outputs[0].name, op.outputs[0].type
            ops = _widened(context, codes, scales, f"{name}:values")
            if ops is None or result is None:
                continue
            given = {**matmul.inputs, "x": shares.inputs[weights], "y": (f"{name}:values",)}
            whole = (NamedValue(f"{name}:mixed", result),)
            product_op = Op("matmul", f"{name}:mixed", given, whole)
            times = constant(np.array(number, np.float32), result.dtype)
            return [*ops, product_op, new_op("mul", name, result, x=f"{name}:mixed", y=times)]
    return None


def _widened(context: Context, codes: Argument, scales: Argument, name: str) -> list[Op] | None:
    """Ops that make `name`: the floats that codes times scales stand for, those of a past in 8 bits
    and then those of new columns. None if the codes are anything else."""
    both = [context.producer(value, "concat") for value in (codes, scales)]
    if both[0] is None or both[1] is None:
        return None
    parts, factors = (join.inputs["values"] for join in both if join is not None)
    cast = context.producer(parts[0], "cast")
    if cast is None or len(parts) != 2 or len(factors) != 2:
        return None
    (past,) = cast.inputs["x"]
    if context.type(past).dtype != "int8" or not context.is_given(past):
        return None
    types = [TensorType(context.shape(part), "fp16") for part in parts]
    return [
        new_op(WIDENED, f"{name}:past", types[0], x=past, scales=factors[0]),
        new_op("mul", f"{name}:new", types[1], x=parts[1], y=factors[1]),
        Op(
            "concat",
            name,
            {**both[0].inputs, "values": (f"{name}:past", f"{name}:new")},
            (NamedValue(name, TensorType(context.shape(codes), "fp16")),),
        ),
    ]
