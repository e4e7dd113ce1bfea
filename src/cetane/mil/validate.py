"""Checks of a program before anything runs, audits or exports it.

`reader.load` calls `check_program`, so every `Program` from a file is valid. Names are plain and
unique, and references resolve to earlier values. Bodies are not nested too deep. No value is too
large, nor are those that are held at one time. Declared types agree with the types that ops
compute, as far as those are known.
"""

from __future__ import annotations

import math
import re
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.dtypes import NUMPY
from cetane.mil.guard import failures_at
from cetane.mil.held import check_held
from cetane.mil.op_types import check_operands, result_types
from cetane.mil.opsets import VERSIONS, needs
from cetane.mil.program import (
    Argument,
    Body,
    MilFunction,
    NamedValue,
    Op,
    Program,
    SizeRange,
    StoredConstant,
    TensorType,
    plain_name,
)
from cetane.mil.shapes import KnownOp, Shape, bounded, result_shapes
from cetane.validation import MOST_ELEMENTS

DEEPEST = 16
"""The most levels of nested bodies."""
HIGHEST_RANK = 12
"""The most axes of a value. Core ML takes 5 in inputs and outputs, and more between them."""
SMALL = 4096
"""The most elements of a constant whose value the check reads: parameters are small."""
_KIND = re.compile(r"[A-Za-z0-9_]{1,64}")
_STATE_OPS = ("read_state", "write_state")
_BODY_OPS = ("cond", "while_loop")


def check_program(program: Program) -> None:
    """Raise CetaneError for an invalid program; it names the function and the op."""
    for name, function in program.functions.items():
        with failures_at(f"{program.path}: function {plain_name(name, 'function')}"):
            check_function(function)
            if VERSIONS.get(function.opset, 0) > program.version > 0:
                raise CetaneError(
                    f"its ops are of {function.opset}, which came with version "
                    f"{VERSIONS[function.opset]} of the specification, and the package is of "
                    f"{program.version}"
                )


def check_function(function: MilFunction) -> None:
    """`check_program` for one function. Raises ValueError or CetaneError."""
    _Checker(function).check()
    check_held(function)


class _Checker:
    def __init__(self, function: MilFunction) -> None:
        self._function = function
        self._types: dict[str, TensorType | None] = {}
        self._values: dict[str, Any] = {}
        """Small constants as plain values."""
        self._body_inputs: set[str] = set()

    def check(self) -> None:
        function = self._function
        for kind, types in (("input", function.inputs), ("state", function.states)):
            for name, type_ in types.items():
                self._define(NamedValue(name, type_), kind)
                if type_.dtype == "string":
                    raise CetaneError(f"the {kind} {name} holds strings")
                _check_sizes(name, type_)
                _check_interface(name, type_)
        self._body(function.body, set(self._types), 0)
        for name in (*function.outputs, *function.dictionaries):
            if name in function.states:
                raise CetaneError(f"the output {name} is a state")

    def _body(self, body: Body, visible: set[str], depth: int) -> None:
        """Check a body; `visible` are the names that its ops may read. They are the same after it:
        a copy for each body would take a time that is squared."""
        if depth > DEEPEST:
            raise CetaneError(f"bodies are nested deeper than {DEEPEST} levels")
        for value in body.inputs if depth else ():
            self._body_input(value, visible)
            visible.add(value.name)
        for op in body.ops:
            with failures_at(f"{op.kind} {op.name}"):
                self._op(op, visible, depth)
            visible.update(value.name for value in op.outputs)
        for name in body.outputs:
            if name not in visible:
                raise CetaneError(f"nothing computes the output {name!r}")
        for made in (body.inputs, *(op.outputs for op in body.ops)):
            visible.difference_update(value.name for value in made)

    def _op(self, op: Op, visible: set[str], depth: int) -> None:
        if not _KIND.fullmatch(op.kind):
            raise CetaneError("its kind is not a name")
        opset, what = needs(op)
        if self._function.opset and opset > self._function.opset:
            raise CetaneError(
                f"{what} came with {opset}, and the function is of {self._function.opset}"
            )
        for parameter, arguments in op.inputs.items():
            for argument in arguments:
                if isinstance(argument, str):
                    self._reference(op, parameter, argument, visible)
        if op.bodies and op.kind not in _BODY_OPS:
            raise CetaneError("it has bodies, which only conditions and loops have")
        for body in op.bodies:
            self._body(body, visible, depth + 1)
        for value in op.outputs:
            self._define(value, "result")
        if op.kind == "const":
            self._const(op)
            return
        for value in op.outputs:
            if value.type is not None and not op.kind.startswith("constexpr_"):
                _check_sizes(value.name, value.type)
        self._state(op)
        self._passed(op)
        self._agreement(op)

    def _reference(self, op: Op, parameter: str, name: str, visible: set[str]) -> None:
        if name not in visible:
            raise CetaneError(f"{parameter} is {name!r}, which nothing has computed before")
        if name in self._function.states and not (op.kind in _STATE_OPS and parameter == "input"):
            raise CetaneError(f"{parameter} is the state {name}, which only read_state reads")

    def _define(self, value: NamedValue, what: str) -> None:
        plain_name(value.name, what)
        if value.name in self._types:
            raise CetaneError(f"two values have the name {value.name}")
        self._types[value.name] = value.type

    def _body_input(self, value: NamedValue, visible: set[str]) -> None:
        """Enter a body's input. The two bodies of a loop may use the same names."""
        again = value.name in self._body_inputs and value.name not in visible
        if not again or self._types[value.name] != value.type:
            self._define(value, "input")
        self._body_inputs.add(value.name)

    def _const(self, op: Op) -> None:
        values, references = op.inputs.get("val", ()), op.inputs.keys() - {"val"}
        if len(values) != 1 or len(op.outputs) != 1 or references:
            raise CetaneError("a constant has one value and one result")
        ((constant,), (output,)) = values, op.outputs
        if not isinstance(constant, StoredConstant):
            raise CetaneError("its value is not a literal")
        if output.type is not None and output.type != constant.type:
            raise CetaneError(f"its value is {constant.type}, but it is declared {output.type}")
        if output.type is None:
            self._types[output.name] = constant.type
        self._values[output.name] = constant

    def _state(self, op: Op) -> None:
        if op.kind not in _STATE_OPS:
            return
        (state,) = op.inputs.get("input", (None,))
        if not isinstance(state, str) or state not in self._function.states:
            raise CetaneError("its input is not a state")
        type_ = self._function.states[state]
        if op.kind == "read_state":
            if len(op.outputs) != 1 or op.outputs[0].type != type_:
                raise CetaneError(f"its result is not of the state's type {type_}")
            return
        (data,) = op.inputs.get("data", (None,))
        given = self._type(data) if data is not None else None
        shape = None if given is None else given.static_shape
        if op.outputs or given is None or given.dtype != type_.dtype:
            raise CetaneError(f"its data are not of the state's type {type_}")
        if shape is not None and not type_.accepts(shape):
            raise CetaneError(f"its data have the shape {shape}, the state is {type_}")

    def _passed(self, op: Op) -> None:
        """Raise CetaneError if bodies take or return values of other types than are declared."""
        if op.kind not in _BODY_OPS:
            return
        if len(op.bodies) != 2:
            raise CetaneError(f"it has {len(op.bodies)} bodies, not 2")
        first, second = op.bodies
        results = [[self._types[name] for name in body.outputs] for body in op.bodies]
        declared = [value.type for value in op.outputs]
        if op.kind == "cond":
            for body, given in zip(op.bodies, results, strict=True):
                _check_passed([], [value.type for value in body.inputs])
                _check_passed(given, declared)
            return
        variables = [self._type(argument) for argument in op.inputs.get("loop_vars", ())]
        for given in (variables, results[1]):
            for wanted in (first.inputs, second.inputs, op.outputs):
                _check_passed(given, [value.type for value in wanted])
        for condition in results[0]:  # coremltools gives it any shape of one element
            shape = None if condition is None else condition.static_shape
            if condition is None or condition.dtype != "bool" or math.prod(shape or ()) != 1:
                raise CetaneError("its condition is not one bool")

    def _agreement(self, op: Op) -> None:
        """Raise CetaneError if a declared type differs from the type that the op computes."""
        check_operands(op, self._dtype)
        shapes = result_shapes(KnownOp(op, self._shape, self._value))
        if shapes is not None and len(shapes) != len(op.outputs):
            raise CetaneError(f"it has {len(op.outputs)} results, not {len(shapes)}")
        for shape, output in zip(shapes or (), op.outputs, strict=False):
            if output.type is None or not output.type.accepts(shape):
                raise CetaneError(
                    f"it computes the shape {shape}, but {output.name} is declared {output.type}"
                )
        wanted = result_types(op, self._dtype, self._value, self._literal)
        for dtype, output in zip(wanted, op.outputs, strict=True):
            if dtype is not None and (output.type is None or output.type.dtype != dtype):
                raise CetaneError(
                    f"it computes {dtype}, but {output.name} is declared {output.type}"
                )

    def _dtype(self, argument: Argument) -> str | None:
        type_ = self._type(argument)
        return None if type_ is None else type_.dtype

    def _literal(self, argument: Argument) -> bool:
        return isinstance(argument, StoredConstant) or argument in self._values

    def _type(self, argument: Argument) -> TensorType | None:
        return argument.type if isinstance(argument, StoredConstant) else self._types[argument]

    def _shape(self, argument: Argument) -> Shape | None:
        type_ = self._type(argument)
        return None if type_ is None or type_.enumerated else type_.static_shape

    def _value(self, argument: Argument) -> Any:
        """A small constant as a plain value; None for any other argument."""
        if isinstance(argument, str):
            if isinstance(self._values.get(argument), StoredConstant):
                self._values[argument] = _small(self._values[argument])
            return self._values.get(argument)
        return _small(argument)


def _small(constant: StoredConstant) -> Any:
    shape = constant.type.static_shape
    return constant.numpy().tolist() if shape is not None and math.prod(shape) <= SMALL else None


def _check_passed(given: list[TensorType | None], wanted: list[TensorType | None]) -> None:
    """Raise CetaneError if values of some types do not fit the types declared where they arrive.
    A flexible shape is compared in each run."""
    if len(given) != len(wanted):
        raise CetaneError(f"{len(given)} values are passed, where {len(wanted)} are declared")
    for one, other in zip(given, wanted, strict=True):
        if one is None or other is None:
            fits = one is other
        else:
            shape = None if one.enumerated else one.static_shape
            fits = one.dtype == other.dtype and (shape is None or other.accepts(shape))
        if not fits:
            raise CetaneError(f"{one or 'a list'} is passed, where {other or 'a list'} is declared")


def _check_sizes(name: str, type_: TensorType) -> None:
    """Raise CetaneError for an unknown type, or for too many axes or elements."""
    if type_.dtype not in NUMPY:
        raise CetaneError(f"{name} has the unknown type {type_.dtype}")
    if len(type_.shape) > HIGHEST_RANK:
        raise CetaneError(f"{name} has {len(type_.shape)} axes, more than {HIGHEST_RANK}")
    for shape in (
        tuple(size if isinstance(size, int) else size.lower for size in type_.shape),
        *(() if type_.default is None else (type_.default,)),
        *type_.enumerated,
    ):
        bounded(shape)
    for size in type_.shape:
        if isinstance(size, SizeRange) and not 0 <= size.lower <= MOST_ELEMENTS:
            raise CetaneError(f"{name} has the size {size}")


def _check_interface(name: str, type_: TensorType) -> None:
    """Raise CetaneError if the interface lets a caller pass a shape that the program lacks."""
    declared = TensorType(type_.shape, type_.dtype, any_shape=type_.any_shape)
    for shape in type_.enumerated:
        if not declared.accepts(shape):
            raise CetaneError(f"{name} may have the shape {shape}, but is declared {declared}")
    if type_.default is not None and not type_.accepts(type_.default):
        raise CetaneError(f"{name} has the default shape {type_.default}, but may be {type_}")
