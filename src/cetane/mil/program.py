"""A loaded program: the content of a package as data, with nothing computed from it.

A `MilFunction` is a list of ops in execution order. An op takes constants and values of earlier
ops. Constants stay on disk until they are read, and stay compressed: an op like any other
(`constexpr_*`) decodes a palette.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY, Array, kind
from cetane.validation import PLAIN_NAME

Precision = Literal["fp32", "fp16", "ane"]


@dataclass(frozen=True)
class SizeRange:
    """The sizes that a flexible dimension may take. Without `upper` there is no limit."""

    lower: int = 0
    upper: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.lower <= size and (self.upper is None or size <= self.upper)

    def __str__(self) -> str:
        return f"{self.lower}..{'' if self.upper is None else self.upper}"


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype ("fp16", "fp32", "int32", "bool", "uint4", ...) of a value.

    A dimension that is known only at run time is a `SizeRange`. If not even the rank is known
    before, `any_shape` is true. Flexible inputs of a function have the package's `default` shape;
    `enumerated` lists the allowed shapes if only some are allowed.
    """

    shape: tuple[int | SizeRange, ...]
    dtype: str
    default: tuple[int, ...] | None = None
    enumerated: tuple[tuple[int, ...], ...] = ()
    any_shape: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape fits."""
        if self.any_shape:
            return True
        if self.enumerated:
            return shape in self.enumerated
        return len(shape) == len(self.shape) and all(
            size in allowed if isinstance(allowed, SizeRange) else size == allowed
            for size, allowed in zip(shape, self.shape, strict=True)
        )

    def accepts_array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """Whether an array of this dtype and shape fits: the same kind of number, and a shape that
        fits."""
        return kind(dtype) == kind(np.dtype(NUMPY[self.dtype])) and self.accepts(shape)

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape, if no dimension is flexible."""
        if self.any_shape:
            return None
        sizes = tuple(size for size in self.shape if isinstance(size, int))
        return sizes if len(sizes) == len(self.shape) else None

    def __str__(self) -> str:
        if self.any_shape:
            return f"{self.dtype} of any shape"
        if self.enumerated:
            return f"{self.dtype} {' or '.join(map(str, self.enumerated))}"
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class StoredConstant:
    """A literal of the program. `numpy()` reads it, memory-mapped where the file allows.

    Integers narrower than a byte take a byte each. A string is a 0-d array of str.
    """

    type: TensorType
    numpy: Callable[[], Array] = field(repr=False)


Argument = str | StoredConstant
"""An argument of an op: the name of a value, or a constant."""


@dataclass(frozen=True)
class NamedValue:
    """A named result. `type` is None for a list or a dictionary."""

    name: str
    type: TensorType | None


@dataclass(frozen=True)
class Op:
    """One operation. An input holds one argument, or several if it is variadic (`values` of
    `concat`). A `const` op has one input, `val`.
    """

    kind: str
    name: str
    inputs: dict[str, tuple[str | StoredConstant, ...]]
    outputs: tuple[NamedValue, ...]
    bodies: tuple[Body, ...] = ()

    def references(self) -> Iterator[str]:
        """The names of values that the op, or a body inside it, reads from outside."""
        for arguments in self.inputs.values():
            yield from (a for a in arguments if isinstance(a, str))
        for body in self.bodies:
            defined = {value.name for value in body.inputs}
            for op in body.ops:
                yield from (name for name in op.references() if name not in defined)
                defined.update(value.name for value in op.outputs)
            yield from (name for name in body.outputs if name not in defined)


@dataclass(frozen=True)
class Body:
    """Ops in execution order, with named inputs and outputs: of a function, a branch or a loop."""

    inputs: tuple[NamedValue, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """One input, output or state in the description. `form` is the dtype of an array ("fp32",
    "fp64", "fp16", "int32") or the colours of an image ("L", "RGB", "BGR", or "F" for float grey).
    `shape` is an array's, by default if it is flexible; outputs need not tell it."""

    kind: Literal["array", "image", "other"]
    form: str = "fp32"
    optional: bool = False
    default: float = 0.0  # the value of every element if the caller leaves the input out
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Features:
    """The features of a function, by name, in the order of the description."""

    inputs: dict[str, Feature] = field(default_factory=dict)
    outputs: dict[str, Feature] = field(default_factory=dict)
    states: dict[str, Feature] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """A function's name, and the names and types of its inputs, outputs and states."""

    name: str
    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    states: dict[str, TensorType]

    def check_inputs(self, names: Iterable[str]) -> None:
        """Raise CetaneError if these are not the names of the inputs."""
        if set(names) != self.inputs.keys():
            raise CetaneError(
                f"function {self.name} has the inputs {listed(self.inputs)}, got {listed(names)}"
            )

    def check_states(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CetaneError if these are not the names and shapes of the states."""
        if shapes.keys() != self.states.keys():
            raise CetaneError(
                f"function {self.name} has the states {listed(self.states)}, got {listed(shapes)}",
                hint="make_state() makes them",
            )
        for name, type_ in self.states.items():
            if not type_.accepts(shapes[name]):
                raise CetaneError(f"state {name}: expected {type_}, got shape {shapes[name]}")

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every state. Raises CetaneError for a state of flexible shape."""
        shapes = {name: type_.static_shape for name, type_ in self.states.items()}
        for name, shape in shapes.items():
            if shape is None:
                raise CetaneError(f"state {name} has no fixed shape: {self.states[name]}")
        return {name: shape for name, shape in shapes.items() if shape is not None}


@dataclass(frozen=True)
class MilFunction(Signature):
    """One function of a program: its signature, and the ops that compute the outputs.

    `dictionaries` are outputs that are not tensors: the probabilities of a classifier. `interface`
    tells which features are images, classes or optional. `opset` names the version of MIL that its
    ops are of."""

    body: Body = field(repr=False)
    dictionaries: tuple[str, ...] = ()
    interface: Features | None = None
    opset: str = ""

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.body.ops

    @property
    def signature(self) -> Signature:
        """The signature alone, without the ops."""
        return Signature(self.name, self.inputs, self.outputs, self.states)


@dataclass(frozen=True)
class Program:
    """The functions of one package. `default` is the function for a caller who names none, and
    `version` is that of the package's specification."""

    path: Path
    functions: dict[str, MilFunction]
    default: str = "main"
    version: int = 0

    @property
    def int8_activations(self) -> bool:
        """Whether it rounds activations to 8 bits."""
        return any(op.kind == "quantize" for one in self.functions.values() for op in one.ops)


@dataclass(frozen=True)
class Pipeline:
    """Programs that run in turn; each takes inputs of the pipeline and results of those before it.

    `outputs` are the names of the results that a caller gets.
    """

    programs: tuple[Program, ...]
    outputs: tuple[str, ...]


def plain_name(name: str, what: str) -> str:
    """`name`, if it is one component of a path: letters, digits and `_ . @ -`, no dot or dash
    first.

    Raises CetaneError for any other name; `what` says what it names, in one word.
    """
    if not re.match(PLAIN_NAME, name) or name.endswith("\n"):
        raise CetaneError(
            f"{name[:60]!r} is not a name of a {what}: use up to 255 letters, digits and _ . @ -"
        )
    return name


def listed(names: Iterable[str]) -> str:
    """Names, joined for a message."""
    return ", ".join(sorted(names)) or "none"
