"""Rewrites of attention, each as `before -> after`; see `fusion`."""

from __future__ import annotations

import numpy as np

from cetane.mil.fast.context import VIEW, Context, constant, literal, made
from cetane.mil.program import Argument, NamedValue, Op, TensorType


def rotation(context: Context, op: Op) -> list[Op] | None:
    """Compute a rotary embedding with one gathered copy of x, and move the signs to the sines.

        add(mul(x, cos), mul(concat(mul(second half of x, -1), first half of x), sin))
        ->  add(mul(x, cos), mul(gather(x, halves swapped), mul(sin, signs)))

    Four nodes instead of seven.
    """
    if op.kind != "add":
        return None
    products = [context.producer(op.inputs[name][0], "mul") for name in ("x", "y")]
    for straight, crossed in (products, products[::-1]):
        if straight is None or crossed is None:
            continue
        for turned, sin in (("x", "y"), ("y", "x")):
            source = _turned(context, crossed.inputs[turned][0])
            if source is None or source[0] not in (*straight.inputs["x"], *straight.inputs["y"]):
                continue
            x, axis = source
            shape, sines = context.shape(x), context.shape(crossed.inputs[sin][0])
            if len(sines) == len(shape) and sines[axis] == shape[axis]:
                return _rotated(context, op, straight, crossed, sin, x, axis)
    return None


def _turned(context: Context, value: Argument) -> tuple[Argument, int] | None:
    """x and the axis, if `value` is [-second half, first half] of x; else None."""
    both = context.producer(value, "concat")
    if both is None or len(both.inputs["values"]) != 2 or context.plain(both, "interleave"):
        return None
    negative, first = both.inputs["values"]
    product = context.producer(negative, "mul")
    head = context.producer(first, "slice_by_index")
    if product is None or head is None:
        return None
    for name in ("x", "y"):
        (second,) = product.inputs[name]
        tail = context.producer(second, "slice_by_index")
        if tail is None or tail.inputs["x"] != head.inputs["x"]:
            continue
        if not context.is_negative(negative, second):
            continue
        (x,) = head.inputs["x"]
        axis = context.plain(both, "axis") % len(context.shape(x))
        size = context.shape(x)[axis]
        if not isinstance(size, int):
            continue
        halves = (axis, 0, size // 2), (axis, size // 2, size)
        if (context.part(head), context.part(tail)) == halves and size % 2 == 0:
            return x, axis
    return None


def _rotated(
    context: Context, op: Op, straight: Op, crossed: Op, sin: str, x: Argument, axis: int
) -> list[Op]:
    type_, (sines,) = context.type(x), crossed.inputs[sin]
    size = type_.shape[axis]
    assert isinstance(size, int)
    signs = np.ones([size if a == axis else 1 for a in range(len(type_.shape))], np.float16)
    signs[(slice(None),) * axis + (slice(0, size // 2),)] = -1
    order = constant(np.roll(np.arange(size, dtype=np.int32), size // 2), "int32")
    signed, turned, product = (
        f"{op.outputs[0].name}:{part}" for part in ("signed", "turned", "crossed")
    )
    kept = {"x": straight.outputs[0].name, "y": product}
    return [
        made("mul", signed, context.type(sines), x=sines, y=constant(signs, type_.dtype)),
        made("gather", turned, type_, x=x, indices=order, axis=literal(axis)),
        made("mul", product, context.type(crossed.outputs[0].name), x=turned, y=signed),
        Op("add", op.name, {name: (value,) for name, value in kept.items()}, op.outputs),
    ]


def past_apart(context: Context, op: Op) -> list[Op] | None:
    """Multiply the past of a cache where it lies, and the new columns by themselves.

        matmul(x, concat(past, new))   ->  concat(matmul(x, past), matmul(x, new))
        matmul(x, concat(past, new)^T) ->  add(matmul(x's first columns, past^T),
                                               matmul(x's last columns, new^T))

    This saves the copy that joins the two.
    """
    if op.kind != "matmul" or context.plain(op, "transpose_x"):
        return None
    both = context.producer(op.inputs["y"][0], "concat")
    if both is None or context.plain(both, "interleave"):
        return None
    rank = len(context.shape(op.inputs["y"][0]))
    parts = both.inputs["values"]
    if context.plain(both, "axis") % rank != rank - 1 or not context.producer(parts[0], VIEW):
        return None
    (x,), result = op.inputs["x"], op.outputs[0].type
    assert result is not None
    lengths = [context.shape(part)[-1] for part in parts]
    sizes = [length for length in lengths if isinstance(length, int)]
    if len(sizes) < len(lengths):
        return None
    names = [f"{op.outputs[0].name}:{index}" for index in range(len(parts))]
    if not context.plain(op, "transpose_y"):
        products = [
            made("matmul", name, TensorType((*result.shape[:-1], size), result.dtype), x=x, y=part)
            for name, size, part in zip(names, sizes, parts, strict=True)
        ]
        joined: dict[str, tuple[Argument, ...]] = {"values": tuple(names), "axis": (literal(-1),)}
        return [*products, Op("concat", op.name, joined, op.outputs)]
    pieces = [f"{op.outputs[0].name}:of_{index}" for index in range(len(parts))]
    weights = context.type(x)
    split = Op(
        "split",
        f"{op.outputs[0].name}:split",
        {"x": (x,), "split_sizes": (literal(sizes),), "axis": (literal(-1),)},
        tuple(
            NamedValue(piece, TensorType((*weights.shape[:-1], size), weights.dtype))
            for piece, size in zip(pieces, sizes, strict=True)
        ),
    )
    flag = op.inputs["transpose_y"][0]
    products = [
        made("matmul", name, result, x=piece, y=part, transpose_y=flag)
        for name, piece, part in zip(names, pieces, parts, strict=True)
    ]
    (total, *others) = names
    sums = []
    for index, other in enumerate(others, 1):
        last = index == len(others)
        name = op.outputs[0].name if last else f"{op.outputs[0].name}:sum_{index}"
        sums.append(made("add", name, result, x=total, y=other))
        total = name
    return [split, *products, *sums]
