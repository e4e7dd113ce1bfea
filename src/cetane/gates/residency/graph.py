"""The graph of a function for rules: compute ops, makers and users of values, forms of weights.

The graph reads no weights: rules only need their types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from cetane.gates.residency.target import Target
from cetane.mil.dtypes import FLOATS, PACKED_BITS, Array, byte_count
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Argument, MilFunction, Op, StoredConstant, TensorType

Granularity = Literal["tensor", "channel", "group", "block"]
LARGEST_VALUE = 1 << 20
"""The most elements of a constant whose values a rule may read."""
VOCABULARY = 32_000
"""The output channels from which a projection counts as a vocabulary's."""

SHAPE_KINDS = frozenset(
    ("reshape", "squeeze", "expand_dims", "transpose", "slice_by_index", "slice_by_size", "concat",
     "split", "tile", "identity", "cast")
)  # fmt: skip
"""Ops that only move values."""
UNARY_KINDS = frozenset(
    ("tanh", "mul", "add", "sub", "real_div", "sigmoid", "silu", "relu", "gelu", "exp", "log",
     "sqrt", "rsqrt", "abs", "clip", "square", "pow", "maximum", "minimum")
)  # fmt: skip
"""Ops on single elements. Ops with two inputs count if one is a constant."""


@dataclass(frozen=True)
class ReadWeight:
    """A stored constant: its dense form and its encoding."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    encoding: Literal["dense", "affine", "lut", "sparse"] = "dense"
    bits: int = 16
    """Bits of one stored element."""
    granularity: Granularity = "tensor"
    """The part that shares a scale or a palette: the tensor, a channel, a group, or a block."""
    inner: ReadWeight | None = None
    """The encoded weight that this one scales, if it is not stored data."""
    palette: str = "fp16"
    """The element type of a palette."""
    vector: int = 1
    """The number of weights in an entry of a palette."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Graph:
    """One function of a package, at the shape it was made for."""

    def __init__(
        self, function: MilFunction, target: Target, package: str = "", functions: int = 1
    ) -> None:
        self.function, self.target = function, target
        self.package, self.functions = package, functions
        """The name of the package, and the number of its functions."""
        self.variant = ""
        """The name of other shapes of a flexible function; empty for those that it was made for.
        The graph's sizes are always of the latter."""
        self.index = FunctionIndex(function)
        self.ops = tuple(op for op in self.index.ops if not is_constant(op))
        """All compute ops, those of nested bodies too."""
        self._weights: dict[str, ReadWeight] = {}
        self.outputs = frozenset(function.body.outputs)

    def maker(self, argument: Argument) -> Op | None:
        """The op that computes a value; None for inputs, states and constants."""
        op = self.index.producer(argument)
        return None if op is None or is_constant(op) else op

    def makers(self, op: Op) -> list[Op]:
        """The ops whose results an op reads."""
        makers = (self.maker(a) for arguments in op.inputs.values() for a in arguments)
        return [maker for maker in makers if maker is not None]

    def users(self, op: Op) -> list[Op]:
        """The ops that read an op's results."""
        readers = (user for value in op.outputs for user in self.index.readers.get(value.name, []))
        return [user for user in readers if not is_constant(user)]

    def is_output(self, op: Op) -> bool:
        return any(value.name in self.outputs for value in op.outputs)

    @property
    def held(self) -> Iterator[tuple[Op, Op]]:
        """Pairs of an op in a nested body, and the op that holds the body, the outer pairs
        first."""
        for holder in self.ops:
            for body in holder.bodies:
                yield from ((op, holder) for op in body.ops if not is_constant(op))

    def argument(self, op: Op, name: str) -> Argument | None:
        """The one argument of an op's input; None if it has none."""
        arguments = op.inputs.get(name, ())
        return arguments[0] if len(arguments) == 1 else None

    def type(self, argument: Argument | None) -> TensorType | None:
        return self.index.type(argument)

    def dtype(self, argument: Argument) -> str | None:
        type_ = self.type(argument)
        return None if type_ is None else type_.dtype

    def shape(self, argument: Argument | None) -> tuple[int, ...]:
        """The sizes of a value, with 1 for a size that only a run can tell; () if none is known."""
        type_ = self.type(argument)
        if type_ is None or type_.any_shape:
            return ()
        if type_.default is not None:
            return type_.default
        return tuple(size if isinstance(size, int) else 1 for size in type_.shape)

    def output_types(self, op: Op) -> list[TensorType]:
        return [value.type for value in op.outputs if value.type is not None]

    def output_shape(self, op: Op) -> tuple[int, ...]:
        return self.shape(op.outputs[0].name) if op.outputs else ()

    def constant(self, argument: Argument | None) -> StoredConstant | None:
        """The literal behind an argument, if it is one and not encoded."""
        if isinstance(argument, StoredConstant):
            return argument
        op = self.index.producer(argument)
        if op is None or op.kind != "const":
            return None
        value = op.inputs["val"][0]
        return value if isinstance(value, StoredConstant) else None

    def value(self, op: Op, name: str) -> Array | None:
        """The value of an input that is a small literal."""
        constant = self.constant(self.argument(op, name))
        if constant is None or prod(constant.type.static_shape or ()) > LARGEST_VALUE:
            return None
        return constant.numpy()

    def number(self, op: Op, name: str, default: Any = None) -> Any:
        """A parameter of an op as a plain value, or its default."""
        value = self.value(op, name)
        return default if value is None else value.tolist()

    def weight(self, argument: Argument | None) -> ReadWeight | None:
        """The constant that an argument is; None for values that are computed."""
        if isinstance(argument, StoredConstant):
            return dense(argument)
        op = self.index.producer(argument)
        return self.weight_of(op) if op is not None and is_constant(op) else None

    def weight_of(self, op: Op) -> ReadWeight:
        """The constant that a `const` or `constexpr_*` op makes."""
        name = op.outputs[0].name
        if name not in self._weights:
            self._weights[name] = self._read_weight(op)
        return self._weights[name]

    def _read_weight(self, op: Op) -> ReadWeight:
        literals = [a for arguments in op.inputs.values() for a in arguments]
        nbytes = sum(self._stored(a) for a in literals)
        type_ = self.index.types[op.outputs[0].name]
        assert type_ is not None
        shape = type_.static_shape or ()
        match op.kind:
            case "constexpr_affine_dequantize":
                data, scale = self.type_of(op, "quantized_data"), self.type_of(op, "scale")
                channel = len(scale.shape) == 1 and scale.shape[0] != 1
                return ReadWeight(
                    shape, type_.dtype, nbytes, "affine", width(data.dtype),
                    "channel" if channel else "tensor",
                )  # fmt: skip
            case "constexpr_blockwise_shift_scale":
                data, scale = self.type_of(op, "data"), self.type_of(op, "scale")
                inner = self.index.producer(self.argument(op, "data"))
                encoded = None if inner is None or inner.kind == "const" else self.weight_of(inner)
                return ReadWeight(
                    shape, type_.dtype, nbytes, "affine", width(data.dtype),
                    granularity(scale.static_shape or (), shape), encoded,
                )  # fmt: skip
            case "constexpr_lut_to_dense":
                return self._read_palette(op, ReadWeight(shape, type_.dtype, nbytes, "lut"))
            case kind if "sparse" in kind:
                return ReadWeight(shape, type_.dtype, nbytes, "sparse")
            case _:
                return ReadWeight(shape, type_.dtype, nbytes, bits=width(type_.dtype))

    def _read_palette(self, op: Op, weight: ReadWeight) -> ReadWeight:
        """What is known of a weight with the form of its palette and indices.

        A palette may have scales of its own: coremltools writes those of output channels so, and
        those of int8 entries.
        """
        indices, lut = self.type_of(op, "indices"), self.type_of(op, "lut")
        scaler = self.index.producer(self.argument(op, "lut"), "constexpr_blockwise_shift_scale")
        scales: tuple[int, ...] = ()
        if scaler is not None:
            lut, scale = self.type_of(scaler, "data"), self.type_of(scaler, "scale")
            if lut.dtype in FLOATS:
                scales = scale.static_shape or ()
        sizes = lut.static_shape or ()
        entries = sizes[-2] if len(sizes) > 1 else sizes[0]
        bits = PACKED_BITS.get(indices.dtype, max(1, (entries - 1).bit_length()))
        vector = sizes[-1] if len(sizes) > 2 else 1
        # Entries are repeated along the axes of float scales.
        groups = [
            1 if axis < len(scales) and scales[axis] > 1 else size
            for axis, size in enumerate(sizes[:-2])
        ]
        several = sum(size > 1 for size in groups)
        a_row = several == 1 and groups[0] == weight.shape[0] > 1
        palette = replace(
            weight, bits=bits // max(1, vector), palette=lut.dtype, vector=vector,
            granularity="tensor" if several == 0 else "channel" if a_row
            else "group" if several == 1 else "block",
        )  # fmt: skip
        if not scales:
            return palette
        return replace(
            weight, encoding="affine", granularity=granularity(scales, weight.shape), inner=palette
        )

    def type_of(self, op: Op, name: str) -> TensorType:
        """The type of an op's input, which it must have."""
        kind = self.type(self.argument(op, name))
        if kind is None:
            raise ValueError(f"{op.kind} {op.name} has no {name}")
        return kind

    def _stored(self, argument: Argument) -> int:
        """Bytes behind an argument of a constant op."""
        if isinstance(argument, StoredConstant):
            return dense(argument).nbytes
        op = self.index.producer(argument)
        return self.weight_of(op).nbytes if op is not None and is_constant(op) else 0

    @cached_property
    def weights(self) -> dict[str, ReadWeight]:
        """Constants that compute ops read, by name; none is counted twice."""
        names = {
            a: None for op in self.ops for arguments in op.inputs.values()
            for a in arguments if isinstance(a, str)
        }  # fmt: skip
        weights = ((name, self.weight(name)) for name in names)
        return {name: weight for name, weight in weights if weight is not None}

    @cached_property
    def constant_bytes(self) -> int:
        """The bytes of the function's constants in its compiled program."""
        return sum(weight.nbytes for weight in self.weights.values())

    @cached_property
    def projections(self) -> tuple[Op, ...]:
        """Ops that multiply by a stored matrix."""
        return tuple(op for op in self.ops if self.matrix(op) is not None)

    def matrix(self, op: Op) -> ReadWeight | None:
        """The stored matrix that an op multiplies by."""
        if op.kind in ("conv", "conv_transpose", "linear"):
            return self.weight(self.argument(op, "weight"))
        if op.kind == "matmul":
            return self.weight(self.argument(op, "y")) or self.weight(self.argument(op, "x"))
        return None

    def depth(self, op: Op) -> int:
        """The number of products that an output of a convolution or matrix product sums; else 0."""
        if op.kind in ("conv", "linear"):
            return prod(self.shape(self.argument(op, "weight"))[1:])
        if op.kind == "matmul":
            axis = -2 if self.number(op, "transpose_x", False) else -1
            shape = self.shape(self.argument(op, "x"))
            return shape[axis] if len(shape) >= -axis else 0
        return 0

    @cached_property
    def tokens(self) -> int:
        """The columns of a call: as many as most 1x1 convolutions output; 1 without these."""
        widths = Counter(
            prod(self.output_shape(op)[2:]) for op in self.ops
            if op.kind == "conv" and prod(self.shape(self.argument(op, "weight"))[2:]) == 1
        )  # fmt: skip
        return widths.most_common(1)[0][0] if widths else 1

    @property
    def flexible(self) -> dict[str, TensorType]:
        """Inputs of more than one shape."""
        return {n: t for n, t in self.function.inputs.items() if t.static_shape is None}


def is_constant(op: Op) -> bool:
    """Whether Core ML evaluates the op when it loads a program: it is no compute op."""
    return op.kind == "const" or op.kind.startswith("constexpr_")


def dense(constant: StoredConstant) -> ReadWeight:
    shape = constant.type.static_shape or ()
    dtype = constant.type.dtype
    nbytes = 0 if dtype == "string" else byte_count(dtype, shape)
    return ReadWeight(shape, dtype, nbytes, bits=width(dtype))


def width(dtype: str) -> int:
    """Bits of one element."""
    return PACKED_BITS.get(dtype, 0) or (8 * byte_count(dtype, (1,)) if dtype != "string" else 0)


def granularity(scales: tuple[int, ...], shape: tuple[int, ...]) -> Granularity:
    """The part of a weight of `shape` that shares a scale."""
    several = [axis for axis, size in enumerate(scales) if size > 1]
    if not several:
        return "tensor"
    alone = len(several) == 1 and scales[several[0]] == shape[several[0]]
    return "channel" if alone else "block"
