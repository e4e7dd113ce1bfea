"""Type rules: the element types of an op's results, and which operands must agree.

They repeat coremltools' own definitions of the ops (9.0, iOS 15 to 18). Core ML refuses a program
that declares other types, and an executor here would round to the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.dtypes import FLOATS, NUMPY
from cetane.mil.program import Argument, Op

_ON_FLOATS = """
    acos affine asin atan atanh avg_pool batch_norm batch_to_space ceil clamped_relu clip conv
    conv_quantized conv_transpose cos cosh crop crop_resize depth_to_space elu erf exp floor gelu
    gru instance_norm inverse l2_norm l2_pool layer_norm leaky_relu linear_activation
    local_response_norm log lstm max_pool pad pixel_shuffle pixel_unshuffle prelu random_categorical
    relu relu6 resample resize_bilinear resize_nearest_neighbor rnn round rsqrt scaled_tanh sigmoid
    sigmoid_hard silu sin sinh softmax softplus softplus_parametric softsign space_to_batch
    space_to_depth sqrt tan tanh thresholded_relu upsample_bilinear upsample_nearest_neighbor
"""
_ON_ANY = """
    abs band_part cumsum exp2 expand_dims flatten2d gather gather_along_axis gather_nd identity
    linear reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max reduce_mean
    reduce_min reduce_prod reduce_sum reduce_sum_square reshape reshape_like resize reverse
    reverse_sequence sign slice_by_index slice_by_size slice_update sliding_windows split square
    squeeze threshold tile transpose
"""
ON_FLOATS = frozenset(_ON_FLOATS.split())
"""Ops whose `x` must be of floats."""
ARITHMETIC = ("add", "floor_div", "maximum", "minimum", "mod", "mul", "pow", "real_div", "sub")
COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")
LOGIC = ("logical_and", "logical_or", "logical_xor")
RESULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*ON_FLOATS, *ARITHMETIC, *_ON_ANY.split()), ("x",)),
    **dict.fromkeys((*COMPARISONS, *LOGIC, "logical_not"), ("bool",)),
    **dict.fromkeys(("concat", "einsum", "stack"), ("values",)),
    **dict.fromkeys(("scatter", "scatter_along_axis", "scatter_nd"), ("data",)),
    **dict.fromkeys(("fill", "fill_like"), ("value",)),
    **dict.fromkeys(("list_length", "non_zero", "shape"), ("int32",)),
    **dict.fromkeys(("reduce_argmax", "reduce_argmin"), ("output_dtype=int32",)),
    **dict.fromkeys(("constexpr_affine_dequantize", "dequantize"), ("scale",)),
    "argsort": ("int32",),
    "cast": ("dtype=",),
    "constexpr_blockwise_shift_scale": ("scale",),
    "constexpr_cast": ("output_dtype=",),
    "constexpr_lut_to_dense": ("lut",),
    "constexpr_lut_to_sparse": ("indices_mask", "lut"),
    "constexpr_sparse_blockwise_shift_scale": ("data_mask", "scale"),
    "constexpr_sparse_to_dense": ("nonzero_data",),
    "non_maximum_suppression": ("boxes", "scores", "int32", "int32"),
    "one_hot": ("on_value",),
    "quantize": ("output_dtype=",),
    "random_bernoulli": ("prob",),
    "random_normal": ("mean",),
    "random_uniform": ("low",),
    "range_1d": ("start",),
    "scaled_dot_product_attention": ("query",),
    "select": ("a",),
    "topk": ("x", "output_indices_dtype=int32"),
}
"""The type of each result of an op; the last entry serves all further results. An entry is an input
that has the type, or the type itself. With `=` it is a parameter that names the type, and its
default. An optional input that is left out tells nothing. `matmul` has a rule of its own."""
ALIKE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS, *LOGIC), ("x", "y")),
    **dict.fromkeys(("concat", "einsum", "stack"), ("values",)),
    **dict.fromkeys(("scatter", "scatter_along_axis", "scatter_nd"), ("data", "updates")),
    **dict.fromkeys(
        ("gru", "lstm", "rnn"),
        ("x", "initial_h", "initial_c", "weight_ih", "weight_hh", "bias"),
    ),
    "non_maximum_suppression": ("boxes", "scores"),
    "one_hot": ("on_value", "off_value"),
    "range_1d": ("start", "end", "step"),
    "scaled_dot_product_attention": ("query", "key", "value"),
    "select": ("a", "b"),
    "slice_update": ("x", "update"),
}
"""Inputs that must have one type."""
Typed = Callable[[Argument], str | None]
"""The type of an argument; None if it is unknown."""


def check_operands(op: Op, typed: Typed) -> None:
    """Raise CetaneError for operands of types that the op does not take together."""
    given = [
        (name, dtype)
        for name in ALIKE.get(op.kind, ())
        for dtype in map(typed, op.inputs.get(name, ()))
        if dtype is not None
    ]
    for name, dtype in given[1:]:
        first, wanted = given[0]
        if dtype != wanted:
            raise CetaneError(f"{first} is {wanted}, {name} is {dtype}")
    x = typed(op.inputs["x"][0]) if op.kind in ON_FLOATS and "x" in op.inputs else None
    if x is not None and x not in FLOATS:
        raise CetaneError(f"x is {x}, and {op.kind} takes floats")
    if op.kind in LOGIC and given and given[0][1] != "bool":
        raise CetaneError(f"x is {given[0][1]}, and {op.kind} takes bool")


def result_types(
    op: Op, typed: Typed, value: Callable[[Argument], Any], literal: Callable[[Argument], bool]
) -> Iterator[str | None]:
    """The type of each result of an op; None if it is unknown.

    `value` gives a parameter's value, and `literal` tells whether an argument is a constant.
    """
    if op.kind == "matmul":
        x, y = (op.inputs[name][0] for name in ("x", "y"))
        yield typed(y if literal(x) and not literal(y) else x)
        return
    rules = RESULTS.get(op.kind, ("",))
    for position in range(len(op.outputs)):
        name, named, default = rules[min(position, len(rules) - 1)].partition("=")
        given = op.inputs.get(name, ())
        if named:
            yield value(given[0]) if given else default or None
        else:
            yield name if name in NUMPY else typed(given[0]) if given else None
