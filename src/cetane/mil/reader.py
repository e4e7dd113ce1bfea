"""Build a `Program` from a package's protobuf.

The messages are read directly, not through coremltools' own importer: that one unpacks every weight
while it loads, and what it returns is its own rewriting of the ops, not the ops in the file.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.blob import BlobFile
from cetane.mil.dtypes import NUMPY, Array, from_bytes
from cetane.mil.package import Package
from cetane.mil.program import Block, Constant, Function, Op, Program, Range, TensorType, Value

# Codes of MIL's DataType enumeration.
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


def load(path: str | Path) -> Program:
    """Read an `.mlpackage` that holds an ML program. No weight is read until it is needed.

    Raises CetaneError if the package, its specification or its weight files are not what they
    should be.
    """
    package = Package(Path(path))
    reader = _Reader(package)
    description = package.spec.description
    described = {function.name: function for function in description.functions}
    try:
        functions = {
            name: reader.function(name, message, described.get(name, description))
            for name, message in sorted(package.spec.mlProgram.functions.items())
        }
    except (LookupError, ValueError) as error:
        raise CetaneError(f"{path}: its specification is damaged: {error}") from error
    if not functions:
        raise CetaneError(f"{path} holds an ML program without functions")
    return Program(package.path, functions)


class _Reader:
    """Translates messages; opens each weight file of the package once."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._blobs: dict[str, BlobFile] = {}

    def function(self, name: str, message: Any, description: Any) -> Function:
        if message.opset not in message.block_specializations:
            raise self._error(f"function {name} has no body for its opset {message.opset!r}")
        body = self.block(message.block_specializations[message.opset])
        features = {f.name: f for f in (*description.input, *description.output)}
        inputs, states = {}, {}
        for named in message.inputs:
            if named.type.WhichOneof("type") == "stateType":
                states[named.name] = self._tensor_type(named.type.stateType.wrappedType)
            else:
                inputs[named.name] = _flexible(
                    self._tensor_type(named.type), features.get(named.name)
                )
        values: dict[str, TensorType | None] = {**inputs}
        values.update({v.name: v.type for op in body.ops for v in op.outputs})
        outputs: dict[str, TensorType] = {}
        for output in body.outputs:
            type_ = values.get(output)
            if type_ is None:
                raise self._error(f"function {name} has an output {output!r} that is no tensor")
            outputs[output] = type_
        return Function(name, inputs, outputs, states, body)

    def block(self, message: Any) -> Block:
        return Block(
            tuple(self._value(named) for named in message.inputs),
            tuple(self._op(op) for op in message.operations),
            tuple(message.outputs),
        )

    def _op(self, message: Any) -> Op:
        inputs: dict[str, tuple[str | Constant, ...]] = {}
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
                name = str(self._constant(value).numpy())
            else:  # `val` of a const, and the parameters of iOS 16's constexpr ops
                inputs[parameter] = (self._constant(value),)
        return Op(
            message.type,
            name,
            inputs,
            tuple(self._value(named) for named in message.outputs),
            tuple(self.block(block) for block in message.blocks),
        )

    def _value(self, message: Any) -> Value:
        is_tensor = message.type.WhichOneof("type") == "tensorType"
        return Value(message.name, self._tensor_type(message.type) if is_tensor else None)

    def _constant(self, message: Any) -> Constant:
        type_ = self._tensor_type(message.type)
        shape = type_.static_shape
        if shape is None:
            raise self._error("a constant has a dimension of unknown size")
        if message.WhichOneof("value") == "blobFileValue":
            blob = self._blob(message.blobFileValue.fileName)
            return Constant(
                type_, partial(blob.read, message.blobFileValue.offset, type_.dtype, shape)
            )
        return Constant(
            type_, partial(_immediate, message.immediateValue.tensor, type_.dtype, shape)
        )

    def _blob(self, name: str) -> BlobFile:
        if name not in self._blobs:
            self._blobs[name] = BlobFile(self._package.file(name))
        return self._blobs[name]

    def _tensor_type(self, message: Any) -> TensorType:
        if message.WhichOneof("type") != "tensorType":
            raise self._error(f"{message.WhichOneof('type')} is not supported here, only tensors")
        tensor = message.tensorType
        if tensor.dataType not in _DTYPES:
            raise self._error(f"data type {tensor.dataType} of MIL is not supported")
        shape = tuple(
            dimension.constant.size if dimension.WhichOneof("dimension") == "constant" else Range()
            for dimension in tensor.dimensions
        )
        return TensorType(shape, _DTYPES[tensor.dataType])

    def _error(self, message: str) -> CetaneError:
        return CetaneError(f"{self._package.path}: {message}")


def _immediate(tensor: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    field = tensor.WhichOneof("value")
    if field == "bytes":
        return from_bytes(np.frombuffer(tensor.bytes.values, np.uint8), dtype, shape)
    values = getattr(tensor, field).values if field else []
    return np.array(values, NUMPY[dtype]).reshape(shape)


def _flexible(type_: TensorType, feature: Any) -> TensorType:
    """Add what the interface description says about the shapes of an input."""
    if feature is None or feature.type.WhichOneof("Type") != "multiArrayType":
        return type_
    array = feature.type.multiArrayType
    default = tuple(array.shape)
    match array.WhichOneof("ShapeFlexibility"):
        case "shapeRange":
            shape = tuple(
                size if isinstance(size, int) else _range(allowed)
                for size, allowed in zip(type_.shape, array.shapeRange.sizeRanges, strict=True)
            )
            return TensorType(shape, type_.dtype, default)
        case "enumeratedShapes":
            shapes = tuple(tuple(s.shape) for s in array.enumeratedShapes.shapes)
            return TensorType(type_.shape, type_.dtype, default, shapes)
    return type_


def _range(allowed: Any) -> Range:
    return Range(allowed.lowerBound, None if allowed.upperBound < 0 else allowed.upperBound)
