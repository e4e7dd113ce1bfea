"""Hidden tensors as rows, a rewrite for onnxruntime.

An ANE program keeps channels on the second axis, `(1, C, 1, T)`. In onnxruntime, products take rows
with channels last, `(1, T, C)`, and a norm over the last axis is one node. So all ops between
pointwise convolutions compute on rows. A row is transposed back where an op needs channels.
"""

from __future__ import annotations

from dataclasses import replace

from cetane.mil.fast.context import PACKED_LINEAR, RMS_NORM, ROWS_LINEAR, Context, ints, new_op
from cetane.mil.program import Argument, MilFunction, NamedValue, Op, TensorType

FEW = 16
"""The most tokens of a call that verifies drafts: its results must not depend on their number."""
_SWAP = ints([0, 2, 1])
_UNARY = {"exp", "gelu", "identity", "relu", "sigmoid", "silu", "softplus", "tanh"}
_BINARY = {"add", "maximum", "minimum", "mul", "real_div", "sub"}


def rows_of_channels(function: MilFunction, pack: bool) -> MilFunction:
    """`function` with its pointwise convolutions as products of rows.

    For a tape, `pack` keeps weights `(N, K, ...)` as the package stores them. Without it, graphs
    get them as `(K, N)`.
    """
    return _Rows(function, pack).function()


def largest_call(function: MilFunction) -> int:
    """The most tokens of a product in a rewritten function; 0 without products."""
    products = [op for op in function.ops if op.kind in (PACKED_LINEAR, ROWS_LINEAR)]
    shapes = [op.outputs[0].type.shape for op in products if op.outputs[0].type is not None]
    return max((rows for _, rows, _ in shapes if isinstance(rows, int)), default=0)


class _Rows:
    def __init__(self, function: MilFunction, pack: bool) -> None:
        self._function, self._pack = function, pack
        self._context = Context(function)
        self._ops: list[Op] = []
        self._rows: set[str] = set()
        """Values that exist as rows `(1, T, C)`."""
        self._lazy: dict[str, TensorType] = {}
        """Values that exist only as rows so far, with their own types."""

    def function(self) -> MilFunction:
        for op in self._function.ops:
            self._rewrite(op)
        for name in self._function.body.outputs:
            self._channels(name)
        return replace(self._function, body=replace(self._function.body, ops=tuple(self._ops)))

    def _rewrite(self, op: Op) -> None:
        match op.kind:
            case "conv" if self._is_product(op):
                self._product(op)
            case _ if self._is_over_channels(op):
                inputs = self._with(op, x=self._row(op.inputs["x"][0]), axes=ints([-1]))
                if "gamma" in op.inputs:
                    inputs["gamma"] = (self._row(op.inputs["gamma"][0]),)
                self._emit(op, inputs)
            case "split" if op.inputs["x"][0] in self._rows and self._axis(op, "axis") == [1]:
                self._emit(op, self._with(op, x=self._row(op.inputs["x"][0]), axis=ints(-1)))
            case kind if kind in _UNARY and op.inputs["x"][0] in self._rows:
                self._emit(op, self._with(op, x=self._row(op.inputs["x"][0])))
            case kind if kind in _BINARY and self._is_by_channel(op):
                given = {name: self._row(op.inputs[name][0]) for name in ("x", "y")}
                self._emit(op, self._with(op, **given))
            case _:
                for name in op.references():
                    self._channels(name)
                self._ops.append(op)

    def _is_product(self, op: Op) -> bool:
        context = self._context
        (weight,), (x,) = op.inputs["weight"], op.inputs["x"]
        if weight not in context.constants or not self._tokens(x):
            return False
        once = all(s == 1 for s in (*context.shape(weight)[2:], *context.plain(op, "strides", ())))
        padded = any(context.plain(op, "pad", ())) and context.plain(op, "pad_type") == "custom"
        return once and not padded and context.plain(op, "groups", 1) == 1

    def _is_over_channels(self, op: Op) -> bool:
        """Whether an op is a norm over the channels of tokens, or their mean."""
        kept = op.kind == "reduce_mean" and self._context.plain(op, "keep_dims")
        if not kept and op.kind != RMS_NORM:
            return False
        return bool(self._tokens(op.inputs["x"][0])) and self._axis(op, "axes") == [1]

    def _product(self, op: Op) -> None:
        (weight,), (x,) = op.inputs["weight"], op.inputs["x"]
        kind = PACKED_LINEAR if self._pack else ROWS_LINEAR
        inputs: dict[str, tuple[Argument, ...]] = {"x": (self._row(x),), "weight": (weight,)}
        if not self._pack:
            inputs["weight"] = (self._columns(weight, f"{op.outputs[0].name}:weight"),)
        if "bias" in op.inputs:
            inputs["bias"] = op.inputs["bias"]
        self._emit(replace(op, kind=kind), inputs)

    def _columns(self, weight: Argument, name: str) -> str:
        """A weight `(N, K, 1, 1)` as `(K, N)`: ops on a constant, which run only once."""
        type_ = self._context.type(weight)
        rows, columns, *_ = type_.static_shape or ()
        flat = TensorType((rows, columns), type_.dtype)
        transposed = TensorType((columns, rows), type_.dtype)
        sizes, swap = ints([rows, columns]), ints([1, 0])
        self._ops += [
            new_op("reshape", f"{name}:flat", flat, x=weight, shape=sizes),
            new_op("transpose", f"{name}:columns", transposed, x=f"{name}:flat", perm=swap),
        ]
        return f"{name}:columns"

    def _is_by_channel(self, op: Op) -> bool:
        """Whether one input has rows and the other fits them: the same shape, one value per
        channel, or a number."""
        given = [op.inputs[name][0] for name in ("x", "y")]
        if not any(a in self._rows for a in given):
            return False
        shape = self._context.shape(next(a for a in given if a in self._rows))
        channel = (shape[1], 1, 1)
        return all(
            (a in self._rows and self._context.shape(a)[2:] == shape[2:])
            or self._context.shape(a) == ()
            or (isinstance(a, str) and self._context.shape(a) in (shape, (1, *channel), channel))
            for a in given
        )

    def _axis(self, op: Op, parameter: str) -> list[int]:
        axes = self._context.plain(op, parameter, [])
        return [a % 4 for a in (axes if isinstance(axes, list) else [axes])]

    def _tokens(self, value: Argument) -> int | None:
        """Tokens of a hidden tensor; None for any other value."""
        shape = self._context.type(value).static_shape
        if shape is None or len(shape) != 4 or shape[0] != 1 or 1 not in shape[2:]:
            return None
        return shape[2] * shape[3]

    def _with(self, op: Op, **changed: Argument) -> dict[str, tuple[Argument, ...]]:
        return {**op.inputs, **{name: (value,) for name, value in changed.items()}}

    def _emit(self, op: Op, inputs: dict[str, tuple[Argument, ...]]) -> None:
        """An op on rows."""
        outputs = []
        for value in op.outputs:
            assert value.type is not None
            self._rows.add(value.name)
            self._lazy[value.name] = value.type
            outputs.append(NamedValue(_name(value.name), _row_type(value.type)))
        self._ops.append(Op(op.kind, op.name, inputs, tuple(outputs)))

    def _row(self, value: Argument) -> Argument:
        """A value `(1, C, 1, T)` as `(1, T, C)`; a number stays a number."""
        type_ = self._context.type(value)
        if type_.shape == ():
            return value
        assert isinstance(value, str)
        if value not in self._rows:
            self._rows.add(value)
            flat = _flat_type(type_)
            self._ops += [
                new_op(
                    "reshape",
                    f"{value}:flat",
                    flat,
                    x=value,
                    shape=ints(flat.static_shape or ()),
                ),
                new_op("transpose", _name(value), _row_type(type_), x=f"{value}:flat", perm=_SWAP),
            ]
        return _name(value)

    def _channels(self, value: str) -> None:
        """Make the value itself, if only its rows exist."""
        type_ = self._lazy.pop(value, None)
        if type_ is not None:
            flat = f"{value}:flat"
            self._ops += [
                new_op("transpose", flat, _flat_type(type_), x=_name(value), perm=_SWAP),
                new_op("reshape", value, type_, x=flat, shape=ints(type_.static_shape or ())),
            ]


def _name(value: str) -> str:
    return f"{value}:rows"


def _row_type(type_: TensorType) -> TensorType:
    _, channels, tokens = _flat_type(type_).shape
    return TensorType((1, tokens, channels), type_.dtype)


def _flat_type(type_: TensorType) -> TensorType:
    *_, channels, height, width = type_.static_shape or ()
    return TensorType((1, channels, height * width), type_.dtype)
