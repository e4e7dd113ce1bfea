"""The reader: builds a `Program` from a package's protobuf.

It reads the messages directly. coremltools' own importer would unpack every weight, and would
return rewritten ops, not the ops in the file.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cetane.errors import LONGEST, CetaneError
from cetane.mil.blob import BlobFile
from cetane.mil.dtypes import NUMPY, Array, byte_count, from_bytes
from cetane.mil.features import flexible_type, read_interface
from cetane.mil.guard import failures_at
from cetane.mil.opsets import VERSIONS
from cetane.mil.package import Package
from cetane.mil.program import (
    Body,
    MilFunction,
    NamedValue,
    Op,
    Pipeline,
    Program,
    SizeRange,
    StoredConstant,
    TensorType,
    plain_name,
)
from cetane.mil.validate import check_program

MOST_OPS = 500_000
"""The most ops and nested bodies of a package. Functions of ports have some 2,000."""

_DTYPES = {
    1: "bool",
    2: "string",
    10: "fp16",
    11: "fp32",
    21: "int8",
    22: "int16",
    23: "int32",
    24: "int64",
    25: "int4",
    31: "uint8",
    32: "uint16",
    33: "uint32",
    34: "uint64",
    35: "uint4",
    36: "uint2",
    37: "uint1",
    38: "uint6",
    39: "uint3",
}
"""Dtypes by the codes of MIL's DataType enumeration."""


def load(path: str | Path) -> Program:
    """Read an `.mlpackage` that holds an ML program. A weight is read only on use.

    Raises CetaneError if the package, its specification or a weight file is damaged or wrong.
    """
    package = Package(Path(path))
    _check_ops(package.path, package.spec)
    return _program(_Reader(package), package.spec)


def load_pipeline(path: str | Path) -> Pipeline:
    """Read a package that holds a pipeline of ML programs, or one program. Raises as `load`."""
    package = Package(Path(path))
    _check_ops(package.path, package.spec)
    outputs = tuple(feature.name for feature in package.spec.description.output)
    return Pipeline(tuple(_programs(_Reader(package), package.spec)), outputs)


def _check_ops(path: Path, spec: Any) -> None:
    """Raise CetaneError for more ops than `MOST_OPS`, before any is read: that takes 40 µs each."""
    count = 0
    bodies = [
        body
        for model in _models(spec)
        for function in model.mlProgram.functions.values()
        for body in function.block_specializations.values()
    ]
    while bodies:
        body = bodies.pop()
        count += 1 + len(body.operations)
        if count > MOST_OPS:
            raise CetaneError(f"{path}: it has more than {MOST_OPS:,} ops")
        for op in body.operations:
            bodies += op.blocks


def _programs(reader: "_Reader", spec: Any) -> Iterator[Program]:
    for model in _models(spec):
        yield _program(reader, model)


def _models(spec: Any) -> Iterator[Any]:
    """The models of a pipeline, and of those inside it; a model that is none."""
    kind = spec.WhichOneof("Type")
    if kind not in ("pipeline", "pipelineClassifier", "pipelineRegressor"):
        yield spec
        return
    pipeline = spec.pipeline if kind == "pipeline" else getattr(spec, kind).pipeline
    for model in pipeline.models:
        yield from _models(model)


def _program(reader: "_Reader", spec: Any) -> Program:
    path = reader.package.path
    if spec.WhichOneof("Type") != "mlProgram":
        kind = spec.WhichOneof("Type") or "empty"
        raise CetaneError(f"{path} holds no ML program (its type is {kind})")
    version, known = int(spec.specificationVersion), sorted(VERSIONS.values())
    if version not in known:
        raise CetaneError(
            f"{path} is of version {version} of Core ML's specification; "
            f"ML programs are of {known[0]} to {known[-1]}"
        )
    description = spec.description
    _check_description(path, description, spec.mlProgram)
    described = {function.name: function for function in description.functions}
    with failures_at(str(path)):
        functions = {
            plain_name(name, "function"): reader.function(
                name, message, described.get(name, description)
            )
            for name, message in sorted(spec.mlProgram.functions.items())
        }
    if not functions:
        raise CetaneError(f"{path} holds an ML program without functions")
    default = description.defaultFunctionName or ("main" if "main" in functions else min(functions))
    if default not in functions:
        raise CetaneError(f"{path} has no function {default!r}, which is its default")
    program = Program(path, functions, default, version)
    check_program(program)
    return program


def _check_description(path: Path, description: Any, program: Any) -> None:
    """Raise CetaneError for what Core ML may read in another way than the check of a program."""
    told = [function.name for function in description.functions]
    if program.version != 1:
        raise CetaneError(f"{path} holds an ML program of version {program.version}, not 1")
    if told and sorted(told) != sorted(program.functions):
        raise CetaneError(
            f"{path} describes the functions {', '.join(sorted(told))}, and has "
            f"{', '.join(sorted(program.functions))}"
        )
    if told and (description.input or description.output or description.state):
        raise CetaneError(f"{path} describes its functions, and the whole besides")


class _Reader:
    """Translates messages, and opens each weight file of the package once."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._blobs: dict[str, BlobFile] = {}
        self._types: dict[bytes, TensorType] = {}
        """By their messages: a program of a thousand ops has a few dozen types."""

    def function(self, name: str, message: Any, description: Any) -> MilFunction:
        """A function, from its message and from that which describes its features."""
        self._check_function(name, message)
        body = self.body(message.block_specializations[message.opset])
        inputs, states = self._inputs(message, description)
        outputs, dictionaries = self._outputs(name, body, inputs)
        interface = read_interface(description)
        return MilFunction(
            name, inputs, outputs, states, body, dictionaries, interface, message.opset
        )

    def _check_function(self, name: str, message: Any) -> None:
        """Raise CetaneError for a function that can be read in two ways, or not at all."""
        if message.opset not in message.block_specializations:
            raise self._error(f"function {name} has no body for its opset {message.opset!r}")
        if message.opset not in VERSIONS:
            raise self._error(f"function {name} has ops of the unknown opset {message.opset!r}")
        if len(message.block_specializations) > 1:
            raise self._error(
                f"function {name} has bodies for several opsets, of which one is read"
            )
        if len({named.name for named in message.inputs}) < len(message.inputs):
            raise self._error(f"function {name} has two inputs of one name")

    def _inputs(
        self, message: Any, description: Any
    ) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """The types of a function's inputs and of its states, by name."""
        features = {f.name: f for f in (*description.input, *description.output)}
        inputs, states = {}, {}
        for named in message.inputs:
            if named.type.WhichOneof("type") == "stateType":
                states[named.name] = self._tensor_type(named.type.stateType.wrappedType)
            else:
                inputs[named.name] = flexible_type(
                    self._tensor_type(named.type), features.get(named.name)
                )
        return inputs, states

    def _outputs(
        self, name: str, body: Body, inputs: dict[str, TensorType]
    ) -> tuple[dict[str, TensorType], tuple[str, ...]]:
        """The types of a function's outputs by name, and the names of those that are dictionaries.

        Raises CetaneError for an output that nothing computes.
        """
        values: dict[str, TensorType | None] = {**inputs}
        values.update({v.name: v.type for op in body.ops for v in op.outputs})
        outputs: dict[str, TensorType] = {}
        dictionaries: list[str] = []
        for output in body.outputs:
            if output not in values:
                raise self._error(f"function {name} has an output {output!r} that nothing computes")
            type_ = values[output]
            if type_ is None:
                dictionaries.append(output)
            else:
                outputs[output] = type_
        return outputs, tuple(dictionaries)

    def body(self, message: Any) -> Body:
        """A body with all its ops."""
        return Body(
            tuple(self._value(named) for named in message.inputs),
            tuple(self._op(op) for op in message.operations),
            tuple(message.outputs),
        )

    def _op(self, message: Any) -> Op:
        inputs: dict[str, tuple[str | StoredConstant, ...]] = {}
        for parameter, argument in message.inputs.items():
            inputs[parameter] = tuple(
                binding.name
                if binding.WhichOneof("binding") == "name"
                else self._constant(binding.value)
                for binding in argument.arguments
            )
        name = message.outputs[0].name if message.outputs else ""
        for parameter, value in message.attributes.items():
            if parameter == "name":
                name = self._text(value)
                if len(name) > LONGEST or not name.isprintable():
                    raise self._error("an op has a name that cannot be printed")
            else:  # `val` of a const, and the parameters of iOS 16's constexpr ops
                inputs[parameter] = (self._constant(value),)
        return Op(
            message.type,
            name,
            inputs,
            tuple(self._value(named) for named in message.outputs),
            tuple(self.body(block) for block in message.blocks),
        )

    def _text(self, message: Any) -> str:
        """The one string of an attribute."""
        strings = message.immediateValue.tensor.strings.values
        if len(strings) != 1:
            raise self._error("an op has a name that is no text")
        return str(strings[0])

    def _value(self, message: Any) -> NamedValue:
        is_tensor = message.type.WhichOneof("type") == "tensorType"
        return NamedValue(message.name, self._tensor_type(message.type) if is_tensor else None)

    def _constant(self, message: Any) -> StoredConstant:
        if message.type.WhichOneof("type") == "listType":
            return self._list(message)
        type_ = self._tensor_type(message.type)
        shape = type_.static_shape
        if shape is None:
            raise self._error("a constant has a dimension of unknown size")
        if message.WhichOneof("value") == "blobFileValue":
            blob = self._blob(message.blobFileValue.fileName)
            blob.check(message.blobFileValue.offset, type_.dtype, shape)
            return StoredConstant(
                type_, partial(blob.read, message.blobFileValue.offset, type_.dtype, shape)
            )
        tensor = message.immediateValue.tensor
        _check_immediate(tensor, type_)
        return StoredConstant(type_, partial(_immediate, tensor, type_.dtype, shape))

    def _list(self, message: Any) -> StoredConstant:
        """A list of scalars (the classes of a classifier), as a vector."""
        items = [self._constant(item) for item in message.immediateValue.list.values]
        dtype = items[0].type.dtype if items else "string"
        if any(item.type != TensorType((), dtype) for item in items):
            raise self._error("a list holds values of several types")
        type_ = TensorType((len(items),), dtype)
        return StoredConstant(type_, lambda: np.array([item.numpy().item() for item in items]))

    def _blob(self, name: str) -> BlobFile:
        if name not in self._blobs:
            self._blobs[name] = BlobFile(self.package.file(name))
        return self._blobs[name]

    def _tensor_type(self, message: Any) -> TensorType:
        key = message.SerializeToString()
        if key not in self._types:
            self._types[key] = self._new_type(message)
        return self._types[key]

    def _new_type(self, message: Any) -> TensorType:
        if message.WhichOneof("type") != "tensorType":
            raise self._error(f"{message.WhichOneof('type')} is not supported here, only tensors")
        tensor = message.tensorType
        if tensor.dataType not in _DTYPES:
            raise self._error(f"data type {tensor.dataType} of MIL is not supported")
        shape = tuple(
            dimension.constant.size
            if dimension.WhichOneof("dimension") == "constant"
            else SizeRange()
            for dimension in tensor.dimensions
        )
        dtype = _DTYPES[tensor.dataType]
        if any(isinstance(size, int) and size >= 1 << 48 for size in shape):
            raise self._error(f"no tensor has the shape {shape}")
        if any(dimension.unknown.variadic for dimension in tensor.dimensions):
            return TensorType((), dtype, any_shape=True)
        return TensorType(shape, dtype)

    def _error(self, message: str) -> CetaneError:
        return CetaneError(f"{self.package.path}: {message}")


def _check_immediate(tensor: Any, type_: TensorType) -> None:
    """Raise ValueError if a literal has another number of elements than its type."""
    field, shape = tensor.WhichOneof("value"), type_.static_shape or ()
    held = len(getattr(tensor, field).values) if field else 0
    wanted = byte_count(type_.dtype, shape) if field == "bytes" else math.prod(shape)
    if held != wanted:
        what = "bytes" if field == "bytes" else "values"
        raise ValueError(f"a literal of type {type_} has {held} {what}, not {wanted}")


def _immediate(tensor: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    field = tensor.WhichOneof("value")
    if field == "bytes":
        return from_bytes(np.frombuffer(tensor.bytes.values, np.uint8), dtype, shape)
    values = getattr(tensor, field).values if field else []
    return np.array(values, NUMPY[dtype]).reshape(shape)
