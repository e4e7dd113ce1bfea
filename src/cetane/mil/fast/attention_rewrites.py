"""Rewrites of attention, each as `before -> after`; see `fusion`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cetane.mil.fast.context import (
    ATTENTION,
    WIDENED,
    Context,
    constant,
    factored,
    ints,
    is_power_of_two,
    new_op,
)
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
        for swapped, sin in (("x", "y"), ("y", "x")):
            source = _swapped(context, crossed.inputs[swapped][0])
            if source is None or source[0] not in (*straight.inputs["x"], *straight.inputs["y"]):
                continue
            x, axis = source
            shape, sines = context.shape(x), context.shape(crossed.inputs[sin][0])
            if len(sines) == len(shape) and sines[axis] == shape[axis]:
                return _rotated(context, op, straight, crossed, sin, x, axis)
    return None


def _swapped(context: Context, value: Argument) -> tuple[Argument, int] | None:
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
        if (context.cut(head), context.cut(tail)) == halves and size % 2 == 0:
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
    signed, swapped, product = (
        f"{op.outputs[0].name}:{part}" for part in ("signed", "swapped", "crossed")
    )
    kept = {"x": straight.outputs[0].name, "y": product}
    return [
        new_op("mul", signed, context.type(sines), x=sines, y=constant(signs, type_.dtype)),
        new_op("gather", swapped, type_, x=x, indices=order, axis=ints(axis)),
        new_op("mul", product, context.type(crossed.outputs[0].name), x=swapped, y=signed),
        Op("add", op.name, {name: (value,) for name, value in kept.items()}, op.outputs),
    ]


def attention(context: Context, op: Op) -> list[Op] | None:
    """Make an op of attention, which runs between graphs (`attention_stage`).

        matmul(softmax(add(matmul(rows, keys), mask)), values^T)
        ->  attention(rows, keys, values, mask)

    Scores may be bounded, `mul(tanh(mul(scores, 1 / cap)), cap)`. A program rounds 1 / cap: its
    relative error becomes a factor of the rows. Weights may have a power of two as a factor, which
    is exact. Keys that are joined from a past and new columns stay apart. A column of scores that
    is cut off after the softmax is a sink.
    """
    found = _attention_inputs(context, op)
    if found is None:
        return None
    (inputs, stretch, factor), result = found, op.outputs[0].type
    if result is None:
        return None
    name = op.outputs[0].name
    mixed = f"{name}:mixed" if factor != 1 else name
    ops = [
        *_stretched(context, inputs, stretch, name),
        *_shown(context, inputs, name),
        Op(ATTENTION, op.name, inputs, (NamedValue(mixed, result),)),
    ]
    if factor != 1:
        number = constant(np.array(factor, np.float32), result.dtype)
        ops.append(new_op("mul", name, result, x=mixed, y=number))
    return ops


def _attention_inputs(
    context: Context, op: Op
) -> tuple[dict[str, tuple[Argument, ...]], float, float] | None:
    """The inputs of the attention that ends with a product, what its rows are to be multiplied by,
    and the factor of its weights. None for a product that ends none."""
    transposes = [context.plain(op, f"transpose_{name}") for name in "xy"]
    if op.kind != "matmul" or transposes[0] or not transposes[1]:
        return None
    weights, factor = factored(context, op.inputs["x"][0])
    found = _softmaxed(context, weights)
    if found is None or not is_power_of_two(factor):
        return None
    scores, sink = found
    operands = _masked_product(context, scores)
    if operands is None:
        return None
    inputs, stretch = operands
    (values,) = op.inputs["y"]
    inputs["values"] = _parts(context, values)
    if sink is not None:
        inputs["sinks"] = (sink,)
    if not _fits(context, inputs):
        return None
    if any(not isinstance(a, str) or a in context.constants for n in inputs if n != "cap"
           for a in inputs[n]):  # fmt: skip
        return None
    return inputs, stretch, factor


def _softmaxed(context: Context, weights: Argument) -> tuple[Argument, Argument | None] | None:
    """The scores and the sink of `softmax(scores)`, or of `slice(softmax(concat(scores, sink)))`;
    None for anything else."""
    softmax = context.producer(weights, "softmax")
    if softmax is not None:
        return (softmax.inputs["x"][0], None) if _is_last(context, softmax) else None
    cut = context.producer(weights, "slice_by_index")
    softmax = cut and context.producer(cut.inputs["x"][0], "softmax")
    both = softmax and context.producer(softmax.inputs["x"][0], "concat")
    if cut is None or softmax is None or both is None or len(both.inputs["values"]) != 2:
        return None
    scores, sink = both.inputs["values"]
    whole = context.cut(cut) == (3, 0, context.shape(scores)[-1])
    last = _is_last(context, softmax) and _is_last(context, both)
    return (scores, sink) if whole and last else None


def _masked_product(
    context: Context, scores: Argument
) -> tuple[dict[str, tuple[Argument, ...]], float] | None:
    """Rows, keys, mask and bound of `add(matmul(rows, keys), mask)`, and the factor of the rows;
    None for anything else."""
    total = context.producer(scores, "add")
    if total is None:
        return None
    for product, mask in (("x", "y"), ("y", "x")):
        bounded, cap, stretch = _bounded(context, total.inputs[product][0])
        matmul = context.producer(bounded, "matmul")
        if matmul is None or any(context.plain(matmul, f"transpose_{n}") for n in "xy"):
            continue
        (rows,), (keys,) = matmul.inputs["x"], matmul.inputs["y"]
        if context.shape(keys)[-1:] != context.shape(total.inputs[mask][0])[-1:]:
            continue  # a mask that is repeated along keys
        given: dict[str, tuple[Argument, ...]] = {"rows": (rows,), "keys": _parts(context, keys)}
        number = constant(np.array(cap, np.float32), "fp32")
        return given | {"mask": total.inputs[mask], "cap": (number,)}, stretch
    return None


def _fits(context: Context, inputs: Mapping[str, tuple[Argument, ...]]) -> bool:
    """Whether operands have the sizes of an `AttentionStage`, which its loops do not check."""
    shapes = {name: [context.shape(value) for value in given]
              for name, given in inputs.items() if name != "cap"}  # fmt: skip
    if any(len(shape) != 4 or shape[0] != 1 for given in shapes.values() for shape in given):
        return False
    (rows,), (mask,), keys, values = (shapes[name] for name in ("rows", "mask", "keys", "values"))
    _, heads, count, width = rows
    return (
        all(shape[1:3] == (heads, width) for shape in keys)
        and all(shape[1] == heads for shape in values)
        and len({shape[2] for shape in values}) == 1
        and [shape[3] for shape in keys] == [shape[3] for shape in values]
        and mask[1] in (1, heads)
        and mask[2] in (1, count)
        and all(s[1] in (1, heads) and s[2] in (1, count) and s[3] == 1
                for s in shapes.get("sinks", ()))
    )  # fmt: skip


def _bounded(context: Context, value: Argument) -> tuple[Argument, float, float]:
    """x, the cap and the product of both factors of `mul(tanh(mul(x, 1 / cap)), cap)`; for anything
    else, the value, 0 and 1."""
    outer, cap = factored(context, value)
    tanh = context.producer(outer, "tanh")
    if tanh is None or cap <= 0:
        return value, 0.0, 1.0
    inner, divisor = factored(context, tanh.inputs["x"][0])
    return inner, cap, cap * divisor


def _stretched(
    context: Context, inputs: dict[str, tuple[Argument, ...]], factor: float, name: str
) -> list[Op]:
    """The op that multiplies the rows by a factor, which replaces them in `inputs`; none for 1."""
    (rows,), number = inputs["rows"], np.array(factor, np.float32)
    if number == 1:
        return []
    inputs["rows"] = (f"{name}:rows",)
    type_ = context.type(rows)
    return [new_op("mul", f"{name}:rows", type_, x=rows, y=constant(number, type_.dtype))]


def _is_last(context: Context, op: Op) -> bool:
    """Whether an op works along the last of four axes."""
    return context.plain(op, "axis", -1) in (-1, 3)


def _parts(context: Context, value: Argument) -> tuple[Argument, ...]:
    """The past and the new columns, if keys are joined from them; else the keys themselves."""
    both = context.producer(value, "concat")
    if both is None or context.plain(both, "interleave") or not _is_last(context, both):
        return (value,)
    parts = both.inputs["values"]
    apart = context.is_given(parts[0]) or context.producer(parts[0], WIDENED) is not None
    return parts if len(parts) == 2 and apart else (value,)


def _shown(context: Context, inputs: dict[str, tuple[Argument, ...]], name: str) -> list[Op]:
    """Ops that widen the past of keys and values where the mask shows it. Their results replace the
    past in `inputs`."""
    ops = []
    for part in ("keys", "values"):
        past, *new = inputs[part]
        widened = context.producer(past, WIDENED)
        if widened is not None:
            shown = f"{name}:shown_{part}"
            given = {**widened.inputs, "mask": inputs["mask"]}
            ops.append(Op(WIDENED, shown, given, (NamedValue(shown, context.type(past)),)))
            inputs[part] = (shown, *new)
    return ops


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
    if context.plain(both, "axis") % rank != rank - 1 or not context.is_given(parts[0]):
        return None
    lengths = [context.shape(part)[-1] for part in parts]
    sizes = [length for length in lengths if isinstance(length, int)]
    if len(sizes) < len(lengths):
        return None
    if context.plain(op, "transpose_y"):
        return _sum_of_products(context, op, parts, sizes)
    return _joined_products(op, parts, sizes)


def _joined_products(op: Op, parts: tuple[Argument, ...], sizes: list[int]) -> list[Op]:
    """`concat(matmul(x, past), matmul(x, new))`."""
    (x,), result = op.inputs["x"], op.outputs[0].type
    assert result is not None
    names = [f"{op.outputs[0].name}:{index}" for index in range(len(parts))]
    products = [
        new_op("matmul", name, TensorType((*result.shape[:-1], size), result.dtype), x=x, y=part)
        for name, size, part in zip(names, sizes, parts, strict=True)
    ]
    joined: dict[str, tuple[Argument, ...]] = {"values": tuple(names), "axis": (ints(-1),)}
    return [*products, Op("concat", op.name, joined, op.outputs)]


def _sum_of_products(
    context: Context, op: Op, parts: tuple[Argument, ...], sizes: list[int]
) -> list[Op]:
    """The products of x's columns, split by `sizes`, with the parts of `y^T`, added up."""
    (x,), result = op.inputs["x"], op.outputs[0].type
    assert result is not None
    name, weights, flag = op.outputs[0].name, context.type(x), op.inputs["transpose_y"][0]
    pieces = [f"{name}:of_{index}" for index in range(len(parts))]
    split = Op(
        "split",
        f"{name}:split",
        {"x": (x,), "split_sizes": (ints(sizes),), "axis": (ints(-1),)},
        tuple(
            NamedValue(piece, TensorType((*weights.shape[:-1], size), weights.dtype))
            for piece, size in zip(pieces, sizes, strict=True)
        ),
    )
    names = [f"{name}:{index}" for index in range(len(parts))]
    products = [
        new_op("matmul", own, result, x=piece, y=part, transpose_y=flag)
        for own, piece, part in zip(names, pieces, parts, strict=True)
    ]
    total, *others = names
    sums = []
    for index, other in enumerate(others, 1):
        summed = name if index == len(others) else f"{name}:sum_{index}"
        sums.append(new_op("add", summed, result, x=total, y=other))
        total = summed
    return [split, *products, *sums]
