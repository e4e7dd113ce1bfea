"""Shape rules: the shapes of an op's results, from the shapes and parameters of its inputs.

The check of a program and the reference executor ask these rules before they allocate anything. No
result, and no tensor on the way to it, may have more than `MOST_ELEMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cetane.mil.program import Argument, Op
from cetane.validation import MOST_ELEMENTS

Shape = tuple[int, ...]
Shapes = list[Shape] | None
"""A shape for each result; None if the rule only bounds the op's memory."""
LONG_ENTRY = 8
"""Weights of a palette's entry. With more, a small file could decode to any size."""


class Unknown(Exception):
    """A shape or value that is missing, or known only at run time."""


class KnownOp:
    """The shapes and parameters of one op. `shape_of` and `value_of` give None for unknown ones;
    the methods raise Unknown for these."""

    def __init__(
        self,
        op: Op,
        shape_of: Callable[[Argument], Shape | None],
        value_of: Callable[[Argument], Any],
    ) -> None:
        self.op, self._shape_of, self._value_of = op, shape_of, value_of

    def shapes(self, name: str) -> list[Shape]:
        """The shapes of all arguments of an input."""
        shapes = [self._shape_of(argument) for argument in self.op.inputs.get(name, ())]
        if not shapes or any(shape is None for shape in shapes):
            raise Unknown
        return [shape for shape in shapes if shape is not None]

    def shape(self, name: str = "x") -> Shape:
        """The shape of an input."""
        return self.shapes(name)[0]

    def value(self, name: str, default: Any = None) -> Any:
        """A parameter as a plain value; `default` if it is missing."""
        if name not in self.op.inputs:
            return default
        value = self._value_of(self.op.inputs[name][0])
        if value is None:
            raise Unknown
        return value

    def values(self, name: str) -> list[int]:
        """A required parameter that is a list of integers."""
        value = self.value(name)
        if value is None:
            raise Unknown
        return [int(item) for item in (value if isinstance(value, list) else [value])]


Rule = Callable[[KnownOp], Shapes]
RULES: dict[str, Rule] = {}
READ_TENSORS = {"range_1d": ("start", "end", "step")}
"""Tensors of an op whose values, not only their shapes, say how large its results are."""


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule of these kinds of op."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return enter


def result_shapes(given: KnownOp) -> Shapes:
    """The shapes of an op's results; None if they are unknown.

    Raises ValueError if the op's inputs do not fit each other, or if a result is too large.
    """
    known = RULES.get(given.op.kind)
    if known is None:
        return None
    try:
        shapes = known(given)
    except Unknown:
        return None
    if not given.op.kind.startswith("constexpr_"):  # the file's size bounds these, but LONG_ENTRY
        for shape in shapes or ():
            bounded(shape)
    return shapes


def bounded(shape: Sequence[int]) -> None:
    """Raise ValueError for a negative size, or for too many elements."""
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {tuple(shape)} has a negative size")
    # Empty tensors too: a library may multiply the other sizes.
    if math.prod(size or 1 for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"the shape {tuple(shape)} has more than {MOST_ELEMENTS} elements")


def axis_of(axis: Any, rank: int) -> int:
    """An axis of `rank` axes, counted from the start. Raises ValueError if there is none."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} among {rank}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """The shape to which these shapes broadcast."""
    rank = max(map(len, shapes))
    sizes = []
    for column in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        wide = {size for size in column if size != 1}
        if len(wide) > 1:
            raise ValueError(f"the shapes {' and '.join(map(str, shapes))} do not broadcast")
        sizes.append(wide.pop() if wide else 1)
    return tuple(sizes)


@rule(
    "abs", "acos", "asin", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor",
    "logical_not", "round", "sin", "sinh", "square", "tan", "tanh", "sqrt", "rsqrt", "inverse",
    "sign", "log", "clip", "threshold", "cast", "relu", "relu6", "leaky_relu", "sigmoid", "silu",
    "softplus", "gelu", "softmax", "softsign", "elu", "clamped_relu", "thresholded_relu",
    "linear_activation", "scaled_tanh", "sigmoid_hard", "prelu", "softplus_parametric",
    "layer_norm", "instance_norm", "batch_norm", "local_response_norm", "l2_norm", "identity",
    "reverse", "reverse_sequence", "cumsum", "argsort", "band_part", "fast:rms_norm",
)  # fmt: skip
def _same(given: KnownOp) -> Shapes:
    return [given.shape()]


@rule("scatter", "scatter_along_axis", "scatter_nd")
def _scattered(given: KnownOp) -> Shapes:
    return [given.shape("data")]


@rule("gather_nd")
def _gather_nd(given: KnownOp) -> Shapes:
    x, indices = given.shape(), given.shape("indices")
    batch = given.value("batch_dims") or 0
    return [(*indices[:-1], *x[batch + indices[-1] :])]


@rule("crop")
def _crop(given: KnownOp) -> Shapes:
    *outer, height, width = given.shape()
    edges = given.values("crop_height"), given.values("crop_width")
    if any(edge < 0 for pair in edges for edge in pair):
        raise ValueError("a crop is negative")
    return [(*outer, height - sum(edges[0]), width - sum(edges[1]))]


@rule("space_to_batch")
def _space_to_batch(given: KnownOp) -> Shapes:
    n, c, *sizes = given.shape()
    blocks, pads = given.values("block_shape"), given.value("paddings")
    padded = [size + sum(pair) for size, pair in zip(sizes, pads, strict=True)]
    if any(block < 1 or size % block for size, block in zip(padded, blocks, strict=True)):
        raise ValueError(f"blocks of {blocks} do not divide {padded}")
    bounded((n, c, *padded))
    inner = (size // block for size, block in zip(padded, blocks, strict=True))
    return [(n * math.prod(blocks), c, *inner)]


@rule("batch_to_space")
def _batch_to_space(given: KnownOp) -> Shapes:
    n, c, *sizes = given.shape()
    blocks, crops = given.values("block_shape"), given.value("crops")
    if any(block < 1 for block in blocks) or n % math.prod(blocks):
        raise ValueError(f"a batch of {n} is no number of blocks of {blocks}")
    if any(edge < 0 for pair in crops for edge in pair):
        raise ValueError("a crop is negative")
    whole = zip(sizes, blocks, crops, strict=True)
    inner = (size * block - sum(pair) for size, block, pair in whole)
    return [(n // math.prod(blocks), c, *inner)]


@rule("resample")
def _resample(given: KnownOp) -> Shapes:
    x, coordinates = given.shape(), given.shape("coordinates")
    return [(x[0], x[1], *coordinates[1:3])]


@rule("non_maximum_suppression")
def _suppressed(given: KnownOp) -> Shapes:
    """The shapes differ between iOS versions, so they stay unknown. The op compares all pairs of
    boxes."""
    boxes = given.shape("boxes")
    bounded((max(boxes[1:]), max(boxes[1:])))
    bounded((boxes[0], given.value("max_boxes"), max(given.shape("scores")[1:])))
    raise Unknown


@rule("quantize", "dequantize")
def _input(given: KnownOp) -> Shapes:
    return [given.shape("input")]


@rule(
    "add", "equal", "floor_div", "greater", "greater_equal", "less", "less_equal", "logical_and",
    "logical_or", "logical_xor", "maximum", "minimum", "mod", "mul", "not_equal", "pow",
    "real_div", "sub",
)  # fmt: skip
def _broadcast(given: KnownOp) -> Shapes:
    return [broadcast(given.shape("x"), given.shape("y"))]


@rule("select")
def _select(given: KnownOp) -> Shapes:
    return [broadcast(*(given.shape(name) for name in ("cond", "a", "b")))]


def with_kept(wanted: Sequence[int], x: Sequence[int]) -> list[int]:
    """The sizes of a reshape of a tensor of sizes `x` to `wanted`; a -1 stays.

    A 0 keeps the size of the axis that is equally far from the last one. Where `x` has no such
    axis, a 0 means 1. Before iOS 17 both shapes have equally many axes, so counting from the first
    axis gives the same.
    """
    kept = [1] * len(wanted) + list(x)
    return [size or kept[at - len(wanted)] for at, size in enumerate(wanted)]


@rule("reshape")
def _reshape(given: KnownOp) -> Shapes:
    x, wanted = given.shape(), given.values("shape")
    sizes = with_kept(wanted, x)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest <= 0 or math.prod(x) % rest:
            raise ValueError(f"{x} cannot be reshaped to {tuple(wanted)}")
        sizes[sizes.index(-1)] = math.prod(x) // rest
    if any(size < 0 for size in sizes) or math.prod(sizes) != math.prod(x):
        raise ValueError(f"{x} cannot be reshaped to {tuple(wanted)}")
    return [tuple(sizes)]


@rule("transpose")
def _transpose(given: KnownOp) -> Shapes:
    x, perm = given.shape(), given.values("perm")
    axes = [axis_of(axis, len(x)) for axis in perm]
    if sorted(axes) != list(range(len(x))):
        raise ValueError(f"{perm} is no order of {len(x)} axes")
    return [tuple(x[axis] for axis in axes)]


@rule("expand_dims")
def _expand_dims(given: KnownOp) -> Shapes:
    x, axes = list(given.shape()), given.values("axes")
    for axis in sorted(axis_of(axis, len(x) + len(axes)) for axis in axes):
        x.insert(axis, 1)
    return [tuple(x)]


@rule("squeeze")
def _squeeze(given: KnownOp) -> Shapes:
    x = given.shape()
    axes = given.value("axes")
    axes = range(len(x)) if axes is None else axes
    gone = {axis_of(axis, len(x)) for axis in axes}
    return [tuple(size for axis, size in enumerate(x) if axis not in gone or size != 1)]


@rule("concat")
def _concat(given: KnownOp) -> Shapes:
    parts = [shape or (1,) for shape in given.shapes("values")]
    first, axis = parts[0], axis_of(given.value("axis"), len(parts[0]))
    before, after = first[:axis], first[axis + 1 :]
    for part in parts:
        if len(part) != len(first) or (part[:axis], part[axis + 1 :]) != (before, after):
            raise ValueError(f"{part} cannot be joined with {first} along axis {axis}")
    return [(*before, sum(part[axis] for part in parts), *after)]


@rule("stack")
def _stack(given: KnownOp) -> Shapes:
    parts = given.shapes("values")
    if len(set(parts)) > 1:
        raise ValueError("tensors of different shapes cannot be stacked")
    axis = axis_of(given.value("axis"), len(parts[0]) + 1)
    return [(*parts[0][:axis], len(parts), *parts[0][axis:])]


@rule("split")
def _split(given: KnownOp) -> Shapes:
    x = given.shape()
    axis = axis_of(given.value("axis"), len(x))
    sizes = given.value("split_sizes")
    if sizes is None:
        count = given.values("num_splits")[0]
        if not 0 < count <= x[axis] or x[axis] % count:
            raise ValueError(f"cannot split {x[axis]} elements into {count} equal parts")
        sizes = [x[axis] // count] * count
    if any(size < 0 for size in sizes) or sum(sizes) != x[axis]:
        raise ValueError(f"cannot split {x[axis]} elements into {sizes}")
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


@rule("slice_by_index")
def _slice_by_index(given: KnownOp) -> Shapes:
    return [_sliced(given)]


@rule("slice_update")
def _updated(given: KnownOp) -> Shapes:
    try:
        part, update = _sliced(given), given.shape("update")
    except Unknown:  # positions that a call computes: the reference asks again
        return [given.shape()]
    if update != part:
        raise ValueError(f"an update of {update} does not fit a slice of {part}")
    return [given.shape()]


def _sliced(given: KnownOp) -> Shape:
    x, begin, end = given.shape(), given.values("begin"), given.values("end")
    rank = len(x)
    stride = given.value("stride") or [1] * rank
    masks = [given.value(f"{name}_mask") or [False] * rank for name in ("begin", "end", "squeeze")]
    if any(len(items) != rank for items in (begin, end, stride, *masks)):
        raise ValueError(f"a slice of {rank} axes needs {rank} positions and masks")
    sizes = []
    for axis, size in enumerate(x):
        first = None if masks[0][axis] else begin[axis]
        last = None if masks[1][axis] else end[axis]
        if masks[2][axis]:
            axis_of(first or 0, size)
        elif stride[axis] == 0:
            raise ValueError("a stride is 0")
        else:
            sizes.append(len(range(size)[first : last : stride[axis]]))
    return tuple(sizes)


@rule("slice_by_size")
def _slice_by_size(given: KnownOp) -> Shapes:
    x, begin, size = given.shape(), given.values("begin"), given.values("size")
    if not len(begin) == len(size) == len(x):
        raise ValueError(f"a slice of {len(x)} axes needs as many positions and sizes")
    starts = [axis_of(b, n) if b != n else n for b, n in zip(begin, x, strict=True)]
    taken = [n - b if s == -1 else s for s, b, n in zip(size, starts, x, strict=True)]
    if any(s < 0 or b + s > n for s, b, n in zip(taken, starts, x, strict=True)):
        raise ValueError(f"a slice of {taken} at {starts} is outside {x}")
    return [tuple(taken)]


@rule("pad")
def _pad(given: KnownOp) -> Shapes:
    x, pad = given.shape(), given.values("pad")
    if len(pad) % 2 or len(pad) // 2 > len(x):
        raise ValueError(f"{len(pad)} numbers pad no {len(x)} axes")
    edges = [0] * (2 * len(x) - len(pad)) + pad
    return [tuple(n + edges[2 * a] + edges[2 * a + 1] for a, n in enumerate(x))]


@rule("tile")
def _tile(given: KnownOp) -> Shapes:
    x, reps = given.shape(), given.values("reps")
    if len(reps) != len(x) or any(count < 0 for count in reps):
        raise ValueError(f"{reps} are no repetitions of {len(x)} axes")
    return [tuple(size * count for size, count in zip(x, reps, strict=True))]


@rule("fill")
def _fill(given: KnownOp) -> Shapes:
    return [tuple(given.values("shape"))]


@rule("random_uniform", "random_normal", "random_bernoulli")
def _random(given: KnownOp) -> Shapes:
    bounded(given.values("shape"))
    return None


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


@rule("make_list")
def _make_list(given: KnownOp) -> Shapes:
    bounded(given.values("init_length") if "init_length" in given.op.inputs else [1])
    return None


@rule("random_categorical")
def _drawn(given: KnownOp) -> Shapes:
    bounded([*given.shape()[:-1], given.value("size", 1)])
    return None


@rule("non_zero")
def _non_zero(given: KnownOp) -> Shapes:
    """How many there are, no shape says; at most all."""
    x = given.shape()
    bounded((math.prod(x), len(x)))
    raise Unknown


@rule("gather")
def _gather(given: KnownOp) -> Shapes:
    x, indices = given.shape(), given.shape("indices")
    axis = axis_of(given.value("axis", 0), len(x))
    batch = given.value("batch_dims", 0)
    if not 0 <= batch <= min(axis, len(indices)):
        raise ValueError(f"{batch} axes are no batch of {indices}")
    return [(*x[:axis], *indices[batch:], *x[axis + 1 :])]


@rule("gather_along_axis")
def _gather_along_axis(given: KnownOp) -> Shapes:
    return [given.shape("indices")]


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


@rule("rnn")
def _rnn(given: KnownOp) -> Shapes:
    return _recurrent(given, 1, ("initial_h",))


@rule("gru")
def _gru(given: KnownOp) -> Shapes:
    return _recurrent(given, 3, ("initial_h",))


@rule("lstm")
def _lstm(given: KnownOp) -> Shapes:
    return _recurrent(given, 4, ("initial_h", "initial_c"))


def _recurrent(given: KnownOp, gates: int, states: tuple[str, ...]) -> Shapes:
    """Steps of a batch `(length, batch, features)` through so many gates. A state may have more
    rows than the batch."""
    x, hidden = given.shape(), given.shape("weight_hh")[-1]
    if len(x) != 3:
        raise ValueError(f"{x} is not length, batch and features")
    both = given.value("direction", "forward") == "bidirectional"
    wide = hidden * (1 + both)
    wanted = {"weight_ih": (gates * hidden, x[-1]), "weight_hh": (gates * hidden, hidden),
              "bias": (gates * hidden,), "peephole": (3 * hidden,)}  # fmt: skip
    wanted |= {f"{name}_back": shape for name, shape in wanted.items()}
    wanted["input_bias"] = wanted["bias"]
    wrong = [n for n, shape in wanted.items() if n in given.op.inputs and given.shape(n) != shape]
    for name in states:
        shape = given.shape(name)
        if len(shape) != 2 or shape[0] < x[1] or shape[1] != wide:
            wrong.append(name)
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} do not fit {x} and {hidden} hidden features")
    bounded((x[0], x[1], gates * hidden))
    steps = x[0] if given.value("output_sequence", False) else 1
    return [(steps, x[1], wide), *[(x[1], wide)] * len(states)]


@rule("matmul")
def _matmul(given: KnownOp) -> Shapes:
    x, y = given.shape("x"), given.shape("y")
    if len(x) < 2 or len(y) < 2:
        raise Unknown
    x = (*x[:-2], x[-1], x[-2]) if given.value("transpose_x", False) else x
    y = (*y[:-2], y[-1], y[-2]) if given.value("transpose_y", False) else y
    return [_product(x, y)]


def _product(x: Shape, y: Shape) -> Shape:
    if x[-1] != y[-2]:
        raise ValueError(f"matrices {x} and {y} have no product")
    shape = (*broadcast(x[:-2], y[:-2]), x[-2], y[-1]) if x[:-2] or y[:-2] else (x[-2], y[-1])
    for operand in (x, y):
        if operand[:-2] != shape[:-2]:
            bounded((*shape[:-2], *operand[-2:]))  # an operand that broadcasts is copied
    return shape


@rule("linear")
def _linear(given: KnownOp) -> Shapes:
    x, weight = given.shape("x"), given.shape("weight")
    if not x or len(weight) != 2 or x[-1] != weight[1]:
        raise ValueError(f"{x} cannot be multiplied with a weight of {weight}")
    return [(*x[:-1], weight[0])]


@rule("scaled_dot_product_attention")
def _attention(given: KnownOp) -> Shapes:
    query, key, value = (given.shape(name) for name in ("query", "key", "value"))
    if min(len(query), len(key), len(value)) < 2:
        raise ValueError("attention needs matrices")
    scores = _product(query, (*key[:-2], key[-1], key[-2]))
    return [_product(scores, value)]


@rule("einsum")
def _einsum(given: KnownOp) -> Shapes:
    equation, parts = str(given.value("equation")), given.shapes("values")
    terms, _, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), parts, strict=True):
        sizes.update(zip(term, shape, strict=True))
    return [tuple(sizes[letter] for letter in result)]


def _windows(given: KnownOp, x: Shape, kernel: Shape) -> list[int]:
    """The sizes of the axes along which windows move. Bounds the padded tensor on the way."""
    rank = len(x) - 2
    if not 1 <= rank <= 3 or len(kernel) != rank or any(taps < 1 for taps in kernel):
        raise ValueError(f"windows of {kernel} do not fit {x}")
    strides = given.value("strides") or [1] * rank
    dilations = given.value("dilations") or [1] * rank
    custom = str(given.value("pad_type", "valid")).lower() == "custom"
    pad = (given.value("pad") if custom else None) or [0] * 2 * rank
    if len(strides) != rank or len(dilations) != rank or len(pad) != 2 * rank:
        raise ValueError(f"strides, dilations or pad are not those of {rank} axes")
    if min(*strides, *dilations) < 1 or max(*strides, *dilations) > MOST_ELEMENTS:
        raise ValueError("a stride or a dilation is no positive number")
    same = str(given.value("pad_type", "valid")).lower().startswith("same")
    sizes, padded = [], []
    for axis, size in enumerate(x[2:]):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        if same:
            count = -(-size // strides[axis])
            padded.append(max(size, (count - 1) * strides[axis] + reach))
        else:
            padded.append(size + pad[2 * axis] + pad[2 * axis + 1])
            count = (padded[-1] - reach) // strides[axis] + 1
        if count < 1 or min(pad) < 0:
            raise ValueError(f"windows of {kernel} do not fit {x}")
        sizes.append(count)
    bounded((*x[:2], *padded))
    return sizes


@rule("conv")
def _conv(given: KnownOp) -> Shapes:
    x, weight, groups = given.shape("x"), given.shape("weight"), given.value("groups", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"{x} and a weight of {weight} make no convolution")
    if groups < 1 or weight[1] * groups != x[1] or weight[0] % groups:
        raise ValueError(f"a weight of {weight} in {groups} groups does not fit {x}")
    if "bias" in given.op.inputs and given.shape("bias") != (weight[0],):
        raise ValueError(f"a bias of {given.shape('bias')} does not fit a weight of {weight}")
    return [(x[0], weight[0], *_windows(given, x, weight[2:]))]


@rule("max_pool", "avg_pool", "l2_pool")
def _pool(given: KnownOp) -> Shapes:
    kernel = tuple(given.values("kernel_sizes"))
    sizes = _windows(given, given.shape(), kernel)
    bounded((*given.shape()[:2], *(size + 1 for size in sizes)))
    return None


@rule("conv_transpose")
def _conv_transpose(given: KnownOp) -> Shapes:
    x, weight, groups = given.shape("x"), given.shape("weight"), given.value("groups", 1)
    rank = len(x) - 2
    strides = given.value("strides") or [1] * rank
    dilations = given.value("dilations") or [1] * rank
    if len(weight) != len(x) or len(strides) != rank or len(dilations) != rank or groups < 1:
        raise ValueError(f"{x} and a weight of {weight} make no convolution")
    reached = [
        (size - 1) * stride + (taps - 1) * dilation + 1
        for size, stride, taps, dilation in zip(x[2:], strides, weight[2:], dilations, strict=True)
    ]
    bounded((x[0], weight[1] * groups, *reached))
    if given.value("output_shape") is not None:
        bounded(given.values("output_shape"))
    if given.value("pad") is not None:
        bounded([x[0], weight[1] * groups, *(r + max(map(abs, given.values("pad")))
                                             for r in reached)])  # fmt: skip
    return None


@rule(
    "upsample_nearest_neighbor", "upsample_bilinear", "resize_nearest_neighbor", "resize_bilinear",
    "resize", "crop_resize", "affine",
)  # fmt: skip
def _resized(given: KnownOp) -> Shapes:
    x = given.shape()
    if len(x) < 2:
        raise ValueError("an image has two axes")
    height, width = x[-2:]
    scales = [given.value(f"scale_factor_{side}", 1) for side in ("height", "width")]
    targets = [
        max(given.value(f"{what}_{side}", 1) for what in ("target", "target_size", "output"))
        for side in ("height", "width")
    ]
    sizes = [math.ceil(height * scales[0]) + targets[0], math.ceil(width * scales[1]) + targets[1]]
    bounded((*x[:-2], *sizes))
    if "shape" in given.op.inputs:
        bounded([*x, *given.values("shape")])
    return None


@rule("sliding_windows")
def _sliding_windows(given: KnownOp) -> Shapes:
    x, size, stride = given.shape(), given.values("size")[0], given.value("stride", 1)
    axis = axis_of(given.value("axis"), len(x))
    if not 1 <= size <= x[axis] or stride < 1:
        raise ValueError(f"windows of {size} every {stride} do not fit {x}")
    return [(*x[:axis], (x[axis] - size) // stride + 1, size, *x[axis + 1 :])]


@rule("constexpr_cast")
def _constexpr_cast(given: KnownOp) -> Shapes:
    return [given.shape("source_val")]


@rule("constexpr_affine_dequantize")
def _affine(given: KnownOp) -> Shapes:
    data, scale = given.shape("quantized_data"), given.shape("scale")
    axis = axis_of(given.value("axis"), len(data))
    for shape in (scale, given.shape("zero_point")):
        if shape not in ((), (1,), (data[axis],)):
            raise ValueError(f"scales of {shape} do not fit {data} along axis {axis}")
    return [data]


@rule("constexpr_blockwise_shift_scale")
def _blockwise(given: KnownOp) -> Shapes:
    data = given.shape("data")
    for name in ("scale", "offset") if "offset" in given.op.inputs else ("scale",):
        blocks = given.shape(name)
        fits = len(blocks) == len(data) and all(
            0 < count <= max(size, 1) for count, size in zip(blocks, data, strict=True)
        )
        if not fits:
            raise ValueError(f"a {name} of {blocks} does not fit {data}")
    return [data]


@rule("constexpr_lut_to_dense")
def _lut_to_dense(given: KnownOp) -> Shapes:
    indices, lut = given.shape("indices"), given.shape("lut")
    if "shape" in given.op.inputs:
        sizes, entries = tuple(given.values("shape")), math.prod(lut)
        if entries < 2 or entries & (entries - 1):
            raise ValueError(f"a palette of {entries} entries has no indices of whole bits")
        _fits_packed(given, "indices", sizes, entries.bit_length() - 1)
        return [sizes]
    return [_looked_up(given, indices, lut)]


@rule("constexpr_lut_to_sparse")
def _lut_to_sparse(given: KnownOp) -> Shapes:
    """How many values the mask keeps, no shape says."""
    _looked_up(given, given.shape("indices_mask"), given.shape("lut"))
    return None


def _looked_up(given: KnownOp, indices: Shape, lut: Shape) -> Shape:
    """The shape of a palette's entries at some indices. Raises ValueError for shapes that do not
    fit, and for a large result of few indices with long entries."""
    if len(lut) != len(indices) + 2:
        raise ValueError(f"a palette of {lut} does not fit indices of {indices}")
    for count, size in zip(lut, indices, strict=False):
        if count < 1 or size % count:
            raise ValueError(f"a palette of {lut} does not fit indices of {indices}")
    if lut[-1] == 1:
        return indices
    axis = axis_of(given.value("vector_axis", -1), len(indices))
    shape = (*indices[:axis], indices[axis] * lut[-1], *indices[axis + 1 :])
    if lut[-1] > LONG_ENTRY:
        bounded(shape)
    return shape


@rule("constexpr_sparse_to_dense")
def _sparse_to_dense(given: KnownOp) -> Shapes:
    if "shape" in given.op.inputs:
        sizes = tuple(given.values("shape"))
        _fits_packed(given, "mask", sizes, 1)
        return [sizes]
    return [given.shape("mask")]


def _fits_packed(given: KnownOp, name: str, sizes: Shape, bits: int) -> None:
    """Raise ValueError if packed bytes do not hold the elements of a shape."""
    if any(size < 0 for size in sizes):
        raise ValueError(f"the shape {sizes} has a negative size")
    needed, there = -(-math.prod(sizes) * bits // 8), math.prod(given.shape(name))
    if needed > there:
        raise ValueError(f"{sizes} of {bits} bits need {needed} bytes, {name} has {there}")
