"""Shape rules of ops that keep the shape of an input, or broadcast several."""

from cetane.mil.shapes.rules import KnownOp, Shapes, broadcast, rule


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
