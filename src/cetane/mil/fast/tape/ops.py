"""Instructions for each MIL op: one function, entered under the op's name.

The first parameter, `w`, is the writer. The annotation of any other decides what it gets: `Place`,
where a value lies; `Places`, several; `Argument`, the argument itself; anything else, plain Python
values. A function raises Unsupported for parameters that no instruction covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cetane.mil.fast.context import ATTENTION, PACKED_LINEAR, RMS_NORM, VIEW, WIDENED
from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.tape.code import MOST_AXES, Binary, Code, Place, Reduction, Unary
from cetane.mil.fast.tape.writer import SHARED, Unsupported, Writer
from cetane.mil.implementation import Implementations
from cetane.mil.program import Argument
from cetane.mil.shapes import with_kept

SPANS = 2
"""The most runs of elements that a gather copies one by one: two halves that change places are
two."""
Places = list[Place]
Mask = list[bool] | None
_FORMS = {
    "Place": "tensor", "Place | None": "tensor", "Places": "tensors", "Argument": "argument",
}  # fmt: skip

INSTRUCTIONS = Implementations(lambda annotation: _FORMS.get(str(annotation), "plain"), ("w",))
enters = INSTRUCTIONS.enters


# Moves of elements: most are only other strides.


@enters("identity")
def identity(w: Writer, x: Place) -> Place:
    return x


@enters("reshape")
def reshape(w: Writer, x: Place, shape: list[int]) -> Place:
    sizes = with_kept(shape, x.shape)
    rest = math.prod(size for size in sizes if size != -1)
    return reshaped(w, x, [x.size // rest if size == -1 else size for size in sizes])


@enters("expand_dims")
def expand_dims(w: Writer, x: Place, axes: list[int]) -> Place:
    rank = len(x.shape) + len(axes)
    new = {axis % rank for axis in axes}
    sizes = iter(x.shape)
    return reshaped(w, x, [1 if axis in new else next(sizes) for axis in range(rank)])


@enters("squeeze")
def squeeze(w: Writer, x: Place, axes: list[int] | None = None) -> Place:
    gone = {axis % len(x.shape) for axis in (range(len(x.shape)) if axes is None else axes)}
    kept = [size for axis, size in enumerate(x.shape) if axis not in gone or size != 1]
    return reshaped(w, x, kept)


@enters("transpose")
def transpose(w: Writer, x: Place, perm: list[int]) -> Place:
    return x.at(0, [x.shape[axis] for axis in perm], [x.strides[axis] for axis in perm])


@enters("split")
def split(
    w: Writer,
    x: Place,
    axis: int,
    num_splits: int | None = None,
    split_sizes: list[int] | None = None,
) -> tuple[Place, ...]:
    size = x.shape[axis]
    if split_sizes is None:
        assert num_splits is not None
        split_sizes = [size // num_splits] * num_splits
    if sum(split_sizes) != size:
        raise Unsupported("parts that are not the whole")
    starts = [sum(split_sizes[:number]) for number in range(len(split_sizes))]
    return tuple(
        part(x, axis, start, size) for start, size in zip(starts, split_sizes, strict=True)
    )


@enters(VIEW)
def view(w: Writer, x: Place, begin: int, end: int) -> Place:
    return part(x, 0, begin, end - begin)


@enters("slice_by_index")
def slice_by_index(
    w: Writer,
    x: Place,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Place:
    offset = 0
    shape, strides = [], []
    for axis, size in enumerate(x.shape):
        step = stride[axis] if stride else 1
        first = None if begin_mask and begin_mask[axis] else begin[axis]
        last = None if end_mask and end_mask[axis] else end[axis]
        if squeeze_mask and squeeze_mask[axis]:
            first = first or 0
            if not -size <= first < size:
                raise Unsupported(f"an index beyond the end of an axis of {size}")
            offset += first % size * x.strides[axis]
            continue
        taken = range(size)[first:last:step]
        if not taken:
            raise Unsupported("an empty slice")
        offset += taken[0] * x.strides[axis]
        shape.append(len(taken))
        strides.append(step * x.strides[axis])
    return x.at(offset, shape, strides)


@enters("concat")
def concat(w: Writer, values: Places, axis: int, interleave: bool = False) -> Place:
    if interleave:
        raise Unsupported("a concat that interleaves")
    values = [value if value.shape else value.at(0, (1,), (1,)) for value in values]
    shape = list(values[0].shape)
    shape[axis] = sum(value.shape[axis] for value in values)
    result, start = w.new(shape), 0
    for value in values:
        w.copy(value, part(result, axis, start, value.shape[axis]))
        start += value.shape[axis]
    return result


@enters("gather", ignores=("validate_indices",))
def gather(w: Writer, x: Place, indices: Argument, axis: int = 0, batch_dims: int = 0) -> Place:
    axis %= len(x.shape)
    spans = _spans(w, indices) if not batch_dims else []
    if 0 < len(spans) <= SPANS:
        shape = (*x.shape[:axis], sum(size for _, size in spans), *x.shape[axis + 1 :])
        result, at = w.new(shape, x), 0
        for start, size in spans:
            w.copy(part(x, axis, start, size), part(result, axis, at, size))
            at += size
        return result
    return _picked(w, x, w.place(indices), axis, batch_dims)


def _spans(w: Writer, indices: Argument) -> list[tuple[int, int]]:
    """Starts and sizes of the runs of a constant list of indices; none for others."""
    given = w.constants.plain(indices) if indices in w.constants else None
    if not isinstance(given, list) or any(not isinstance(n, int) or n < 0 for n in given):
        return []
    spans: list[tuple[int, int]] = []
    for index in given:
        if spans and index == sum(spans[-1]):
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((index, 1))
    return spans


def _picked(w: Writer, x: Place, indices: Place, axis: int, batch_dims: int) -> Place:
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    sizes = [math.prod(before), x.shape[axis], math.prod(after)]
    joined = x.reshaped(sizes)
    if batch_dims or len(indices.shape) > 1:
        raise Unsupported("a gather along several axes")
    joined = joined or reshaped(w, x, sizes)
    result = w.new((*before, *indices.shape, *after))
    steps = (joined.strides[2], joined.strides[0], joined.strides[1])
    more = (sizes[0], indices.size, sizes[2], *steps, sizes[1])
    return w.emit(Code.PICK, result, joined, w.whole(indices), more=more, shared=False)


@enters("slice_update", ignores=("end", "end_mask"))
def slice_update(
    w: Writer,
    x: Argument,
    update: Place,
    begin: Place,
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Place:
    """The shape of the update gives the end of the slice."""
    if any(step != 1 for step in stride or ()) or any(squeeze_mask or ()):
        raise Unsupported("an update with steps")
    if len(update.shape) > MOST_AXES:
        raise Unsupported(f"an update along more than {MOST_AXES} axes")
    result, update = w.own(x), w.whole(update)
    more = [len(result.shape)]
    for axis, (size, own) in enumerate(zip(result.shape, update.shape, strict=True)):
        more += [size, own, int(not (begin_mask and begin_mask[axis]))]
    return w.emit(Code.UPDATE, result, update, w.whole(begin), more=more, shared=False)


def part(x: Place, axis: int, start: int, size: int) -> Place:
    """`start : start + size` of one axis."""
    axis %= len(x.shape)
    if not 0 <= start <= start + size <= x.shape[axis]:
        raise Unsupported(f"a part beyond the end of an axis of {x.shape[axis]}")
    shape = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
    return x.at(start * x.strides[axis], shape, x.strides)


def reshaped(w: Writer, x: Place, shape: Sequence[int]) -> Place:
    """The same elements in another shape, copied if there is no other way."""
    if math.prod(shape) != x.size:
        raise Unsupported(f"{x.size} elements in the shape {tuple(shape)}")
    found = x.reshaped(shape)
    if found is None and len(x.shape) > 1 and x.strides[-1] > min(x.strides[:-1]):
        rows = w.turned(w.new(x.shape))  # rows of tokens stay rows
        if rows.reshaped(shape) is not None:
            return reshaped(w, w.copy(x, rows), shape)
    found = found or w.copy(x, w.new(x.shape)).reshaped(shape)
    assert found is not None
    return found


# Element by element.

_UNARY = {
    "silu": Unary.SILU, "sigmoid": Unary.SIGMOID, "tanh": Unary.TANH, "exp": Unary.EXP,
    "relu": Unary.RELU, "softplus": Unary.SOFTPLUS, "sqrt": Unary.SQRT, "square": Unary.SQUARE,
    "abs": Unary.ABS, "round": Unary.ROUND,
}  # fmt: skip
_WITH_EPSILON = {"rsqrt": Unary.RSQRT, "log": Unary.LOG, "inverse": Unary.INVERSE}
_BINARY = {
    "add": Binary.ADD, "sub": Binary.SUB, "mul": Binary.MUL, "real_div": Binary.DIV,
    "maximum": Binary.MAXIMUM, "minimum": Binary.MINIMUM, "equal": Binary.EQUAL,
    "not_equal": Binary.NOT_EQUAL, "greater": Binary.GREATER,
    "greater_equal": Binary.GREATER_EQUAL, "less": Binary.LESS, "less_equal": Binary.LESS_EQUAL,
    "logical_and": Binary.MUL, "logical_or": Binary.MAXIMUM,
}  # fmt: skip
_GELU = {
    "EXACT": Unary.GELU, "TANH_APPROXIMATION": Unary.GELU_TANH,
    "SIGMOID_APPROXIMATION": Unary.GELU_SIGMOID,
}  # fmt: skip


def _unary(kind: str, number: Unary) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place) -> Place:
        return transformed(w, x, number)


def _with_epsilon(kind: str, number: Unary, usual: float) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place, epsilon: float = usual) -> Place:
        return transformed(w, x, number, epsilon)


def _binary(kind: str, number: Binary) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place, y: Place) -> Place:
        return combined(w, x, y, number)


for _kind, _number in _UNARY.items():
    _unary(_kind, _number)
for _kind, _epsilon_number in _WITH_EPSILON.items():
    _with_epsilon(_kind, _epsilon_number, {"rsqrt": 1e-12, "inverse": 1e-4}.get(_kind, 1e-45))
for _kind, _binary_number in _BINARY.items():
    _binary(_kind, _binary_number)


@enters("gelu")
def gelu(w: Writer, x: Place, mode: str = "EXACT") -> Place:
    return transformed(w, x, _GELU[mode])


@enters("clip")
def clip(w: Writer, x: Place, alpha: float, beta: float) -> Place:
    return transformed(w, x, Unary.CLIP, alpha, beta)


@enters("cast")
def cast(w: Writer, x: Place, dtype: str) -> Place:
    """Numbers of a tape are float32: integers below 2**24 are exact."""
    if dtype not in ("fp16", "fp32"):
        raise Unsupported(f"a cast to {dtype}")
    return widened(w, x, w.number(1.0, (*x.shape[:2], 1, x.shape[-1]))) if x.narrow else x


@enters(WIDENED)
def widened(w: Writer, x: Place, scales: Place, mask: Place | None = None) -> Place:
    """Whole numbers of 8 bits `(1, H, D, S)` times scales `(1, H, 1, S)`, in the slots that the
    mask shows; in all of them without a mask. Hidden slots hold anything."""
    if not x.narrow or len(x.shape) != 4 or x.shape[0] != 1 or not x.contiguous:
        raise Unsupported("scales of other numbers")
    _, heads, width, slots = x.shape
    scales = scales.broadcast((1, heads, 1, slots))
    runs = -1
    if mask is not None:
        mask = w.whole(mask)
        runs = w.runs(mask, slots, mask.shape[3] - slots)
    more = (heads, width, slots, runs)
    return w.emit(Code.WIDEN, w.new(x.shape), x, w.whole(scales), more=more, shared=True)


@enters("select")
def select(w: Writer, cond: Place, a: Place, b: Place) -> Place:
    shape = _common(_common(cond.shape, a.shape), b.shape)
    operands = [place.broadcast(shape) for place in (cond, a, b)]
    return w.emit(Code.SELECT, w.new(shape), *operands)


def transformed(w: Writer, x: Place, kind: Unary, *numbers: float) -> Place:
    """A function of each element, in the order in which they lie."""
    return w.emit(Code.UNARY, w.new(x.shape, x), x, kind=kind, numbers=numbers)


def combined(w: Writer, x: Place, y: Place, kind: Binary) -> Place:
    shape = _common(x.shape, y.shape)
    whole = [place for place in (x, y) if place.shape == shape and shape]
    like = min(whole, key=lambda place: place.strides[-1], default=None)

    def made() -> Place:
        operands = [
            w.along(place, like) if like and 1 < place.size < like.size else place
            for place in (x, y)
        ]
        wide = [place.broadcast(shape) for place in operands]
        return w.emit(Code.BINARY, w.new(shape, like), *wide, kind=kind)

    return w.once(("combined", x, y, kind), [x, y], made)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which two shapes broadcast."""
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


# Lines: all elements along an axis.

_REDUCTIONS = {
    "reduce_sum": Reduction.SUM, "reduce_mean": Reduction.MEAN, "reduce_max": Reduction.MAX,
    "reduce_min": Reduction.MIN,
}  # fmt: skip


@enters(RMS_NORM)
def rms_norm(
    w: Writer, x: Place, axes: list[int], epsilon: float, gamma: Place | None = None
) -> Place:
    """x divided by the root of the mean square of a line, times gamma."""
    if len(axes) != 1:
        raise Unsupported("a norm over several axes")
    count = x.shape[axes[0]]
    factor = w.number(1.0, (count,)) if gamma is None else reshaped(w, gamma, (count,))
    last = axes[0] % len(x.shape) == len(x.shape) - 1
    result = w.new(x.shape, None if last else x)
    return _along(w, Code.NORM, x, result, axes[0], w.whole(factor), numbers=(epsilon,))


@enters("softmax")
def softmax(w: Writer, x: Place, axis: int = -1) -> Place:
    return _along(w, Code.SOFTMAX, x, w.new(x.shape, x), axis)


def _reduction(kind: str, number: Reduction) -> None:
    @enters(kind)
    def instruction(
        w: Writer, x: Place, axes: list[int] | None = None, keep_dims: bool = False
    ) -> Place:
        rank = len(x.shape)
        gone = sorted({axis % rank for axis in (range(rank) if axes is None else axes)})
        kept = [axis for axis in range(rank) if axis not in gone]
        moved = transpose(w, x, [*kept, *gone])
        lines = reshaped(w, moved, [*(x.shape[axis] for axis in kept), -1 if not gone else
                                    math.prod(x.shape[axis] for axis in gone)])  # fmt: skip
        result = w.new((*lines.shape[:-1], 1))
        _along(w, Code.REDUCE, lines, result, -1, kind=number)
        shape = [1 if axis in gone else x.shape[axis] for axis in range(rank)]
        return reshaped(w, result, shape if keep_dims else [x.shape[axis] for axis in kept])


for _kind, _reduction_number in _REDUCTIONS.items():
    _reduction(_kind, _reduction_number)


def _along(
    w: Writer, code: Code, x: Place, result: Place, axis: int, *operands: Place, kind: int = 0,
    numbers: tuple[float, ...] = (),
) -> Place:  # fmt: skip
    """An instruction on lines along an axis."""
    axis %= len(x.shape)
    others = [a for a in range(len(x.shape)) if a != axis and x.shape[a] != 1]
    others.sort(key=lambda a: -x.strides[a])
    if len(others) > 3:
        raise Unsupported("lines over more than three axes")
    missing = [0] * (3 - len(others))
    more = [
        *(1 for _ in missing), *(x.shape[a] for a in others),
        x.shape[axis], x.strides[axis], result.strides[axis],
        *missing, *(x.strides[a] for a in others),
        *missing, *(result.strides[a] for a in others),
    ]  # fmt: skip
    large = x.size >= SHARED
    return w.emit(code, result, x, *operands, kind=kind, more=more, numbers=numbers, shared=large)


# Products.


@enters(PACKED_LINEAR)
def packed_linear(w: Writer, x: Place, weight: Argument, bias: Place | None = None) -> Place:
    """The product of rows `x (1, T, K)` with a constant weight (N, K, ...): (1, T, N)."""
    stored = w.store.rows(w.constants, weight)
    shape = w.constants.type(weight).static_shape
    assert shape is not None
    _, tokens, columns = x.shape
    whole = -(-columns // BLOCK) * BLOCK
    if (x.strides[2] != 1 and columns > 1) or columns != whole:
        filled = w.new((1, tokens, whole))
        if columns != whole:
            w.emit(Code.UNARY, filled, filled, kind=Unary.FILL, numbers=(0.0,))
        x = w.copy(x, part(filled, 2, 0, columns))
    wide = w.new((1, tokens, stored.count))
    more = (
        tokens, whole, stored.count, stored.count, x.strides[1] if tokens > 1 else whole,
        stored.row_bytes, stored.data, stored.scale, stored.more, stored.which,
    )  # fmt: skip
    w.emit(Code.PRODUCT, wide, x, kind=stored.form, more=more, shared=True)
    result = part(wide, 2, 0, shape[0])
    return result if bias is None else combined(w, result, bias, Binary.ADD)


@enters("matmul")
def matmul(
    w: Writer, x: Place, y: Place, transpose_x: bool = False, transpose_y: bool = False
) -> Place:
    """Products of matrices, of up to two axes of batches."""
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise Unsupported("a product with a vector")
    x, y = (_turned(w, a) if flag else a for a, flag in ((x, transpose_x), (y, transpose_y)))
    (*batch_x, rows, inner), (*batch_y, _, columns) = x.shape, y.shape
    batch = _common(tuple(batch_x), tuple(batch_y))
    sizes = [size for size in batch if size != 1]
    if len(sizes) > 2:
        raise Unsupported("a product of more than two axes of matrices")
    result = w.new((*batch, rows, columns))
    wide = [a.broadcast((*batch, *a.shape[-2:])) for a in (x, y)] + [result]
    steps = [
        [0] * (2 - len(sizes))
        + [stride for stride, size in zip(a.strides, batch, strict=False) if size != 1]
        + list(a.strides[-2:])
        for a in wide
    ]
    more = [*[1] * (2 - len(sizes)), *sizes, rows, inner, columns]
    more += [step for own in steps for step in own]
    large = result.size * inner >= 1 << 16
    return w.emit(Code.MATMUL, result, x, y, more=more, shared=large)


def _turned(w: Writer, x: Place) -> Place:
    rank = len(x.shape)
    return transpose(w, x, [*range(rank - 2), rank - 1, rank - 2])


@enters("conv")
def conv(
    w: Writer,
    x: Place,
    weight: Place,
    bias: Place | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Place:
    """A convolution along the last axis of `(1, C, L)` or `(1, C, 1, L)`."""
    axes = len(x.shape) - 2
    if x.shape[0] != 1 or any(size != 1 for size in (*x.shape[2:-1], *weight.shape[2:-1])):
        raise Unsupported("a convolution over several axes")
    edges = pad if pad and pad_type == "custom" else [0] * 2 * axes
    if pad_type not in ("valid", "custom") or any(edges[:-2]):
        raise Unsupported(f"a convolution with padding {pad_type}")
    stride, dilation = (given[-1] if given else 1 for given in (strides, dilations))
    channels, inputs, taps = weight.shape[0], weight.shape[1], weight.shape[-1]
    if inputs * groups != x.shape[1] or channels % groups:
        raise Unsupported("a convolution of other channels")
    length = x.shape[-1]
    count = (length + sum(edges[-2:]) - (taps - 1) * dilation - 1) // stride + 1
    result = w.new((1, channels, *[1] * (axes - 1), count))
    given = w.number(0.0, (channels,)) if bias is None else w.whole(bias)
    more = (
        channels // groups, inputs, groups, taps, length, count, stride, dilation, edges[-2],
        x.strides[1], x.strides[-1], result.strides[1], result.strides[-1],
    )  # fmt: skip
    large = result.size * inputs * taps >= 1 << 16
    return w.emit(Code.CONV, result, x, w.whole(weight), given, more=more, shared=large)


@enters(ATTENTION)
def attention(
    w: Writer,
    rows: Place,
    keys: Places,
    values: Places,
    mask: Place,
    cap: float,
    exact: int,
    sinks: Place | None = None,
) -> Place:
    """`attend.AttentionStage` tells what it computes."""
    _, heads, count, width = rows.shape
    out = values[0].shape[2]
    past, new = keys[0].shape[3], keys[1].shape[3] if len(keys) > 1 else 0
    mask = w.whole(mask)
    if mask.shape[3] != past + new:
        raise Unsupported("a mask that is repeated along keys")
    rows = w.whole(rows)
    parts = [w.whole(place) for given in (keys, values) for place in given]
    if not new:
        parts = [parts[0], parts[0], parts[1], parts[1]]
    runs = w.runs(mask, past, new)
    seen = rows if sinks is None else w.whole(sinks.broadcast((1, heads, count, 1)))
    result = w.new((1, heads, count, out))
    more = (
        heads, count, width, out, past, new, mask.shape[1], mask.shape[2], runs,
        int(sinks is not None),
    )  # fmt: skip
    return w.emit(
        Code.ATTEND, result, rows, mask, seen, kind=exact, more=more, numbers=(cap,), shared=True,
        others=parts,
    )  # fmt: skip
