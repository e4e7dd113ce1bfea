"""The placing of weights into converted functions, so that no pass can change them."""

from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.backend.mil.load import MILProtoExporter
from coremltools.converters.mil.mil import Function, Program, types
from coremltools.proto import MIL_pb2

from cetane.compress.encoded import Affine, Encoded, Palettized
from cetane.errors import CetaneError
from cetane.lower.converted import ConstantOf, Converted, arguments, slices_of
from cetane.lower.frontend import constexpr_cetane_weight
from cetane.lower.recorder import content_of

Array = np.ndarray[Any, Any]
Parts = dict[str, Array]
"""A constant as arrays, by the input names of its MIL op; a dense one has only `weight`."""


class Placing:
    """A weight file, and the ops that read it."""

    def __init__(self, constant: ConstantOf, folder: Path, opset: Any, version: int) -> None:
        """Make the weight file in `folder`.

        `constant` gives the weight of each label, and is called once for each. `opset` is
        coremltools' deployment target. `version` is that of the specification.
        """
        self._constant, self._opset = constant, opset
        self._exporter = MILProtoExporter(Program(), str(folder), version)
        self._weights: dict[tuple[str, str], Any] = {}

    def place(self, converted: Converted) -> tuple[Any, dict[str, str]]:
        """The protobuf message of a function with all its constants, and the label of every weight
        by the name of its op.

        A conversion gives each weight as an op without a value in fp32, and a cast of it. A weight
        in fp16 takes the place of both. Raises CetaneError for a weight that an op reads in fp32.
        """
        function = MIL_pb2.Function()
        function.CopyFrom(converted.function)
        block = function.block_specializations[function.opset]
        move_slices(function, converted)
        placed: dict[str, str] = {}
        bare: dict[str, str] = {}
        """The names of weights' ops, by the names of the fp32 values that stand for them."""
        cast: dict[str, str] = {}
        """The names of weights' ops, by the names of these values cast to fp16."""
        types_of_casts: set[str] = set()
        """The names of the constants that give these casts their type. Without the casts, no op
        reads them, and they go too."""
        ops = []
        for op in block.operations:
            read = {argument.name for argument in arguments(op)}
            if op.type == constexpr_cetane_weight.__name__:
                name, label = name_and_label(op, converted)
                bare[op.outputs[0].name], placed[name] = name, label
                ops.append(self._weight(name, label))
            elif weights := bare.keys() & read:
                name = bare[weights.pop()]
                if op.type != "cast" or op.outputs[0].type.tensorType.dataType != MIL_pb2.FLOAT16:
                    raise CetaneError(f"lowering left the weight {placed[name]} in fp32")
                cast[op.outputs[0].name] = name
                types_of_casts.add(op.inputs["dtype"].arguments[0].name)
            else:
                for argument in arguments(op):
                    argument.name = cast.get(argument.name, argument.name)
                if op.type == "const" and op.attributes["val"].HasField("blobFileValue"):
                    array = converted.arrays[op.outputs[0].name]
                    op.attributes["val"].CopyFrom(self._stored(array))
                ops.append(op)
        idle = types_of_casts.difference(a.name for op in ops for a in arguments(op))
        kept = [op for op in ops if op.type != "const" or op.outputs[0].name not in idle]
        body = MIL_pb2.Block(inputs=block.inputs, outputs=block.outputs, operations=kept)
        block.CopyFrom(body)
        return function, placed

    def _weight(self, name: str, label: str) -> Any:
        """The iOS 18 op that makes a weight when Core ML loads a program."""
        if (name, label) not in self._weights:
            with Function({}, opset_version=self._opset):
                op = emit(name, label, parts_of(self._constant(label)))
            translate = (
                self._exporter.translate_const
                if op.op_type == "const"
                else self._exporter.translate_constexpr
            )
            self._weights[name, label] = translate(op)
        return self._weights[name, label]

    def _stored(self, array: Array) -> Any:
        """The place in the file of a constant that is no weight. Equal constants share it."""
        with Function({}, opset_version=self._opset):
            var = mb.const(val=array, name="shared")
        var.op.weight_id = content_of(array)
        return self._exporter.get_milproto_value(var)


def name_and_label(op: Any, converted: Converted) -> tuple[str, str]:
    """The name and the label of a weight, from the op that stands for it."""
    label = text_of(op.attributes["label"])
    name = text_of(op.attributes["name"])
    own = converted.labels.get(label, label)
    return name.replace(label.replace(".", "_"), own.replace(".", "_")), own


def text_of(value: Any) -> str:
    """The text that a value holds."""
    (text,) = value.immediateValue.tensor.strings.values
    return str(text)


def move_slices(function: Any, converted: Converted) -> None:
    """Write the places of `converted.slices` into a function, in place."""
    numbers: dict[str, tuple[int, int]] = {}
    """The axis and the new number of each constant, by its name."""
    for (begin, end), old in slices_of(function).items():
        if (new := converted.slices.get(old)) is not None:
            numbers |= {begin: (new.axis, new.start), end: (new.axis, new.stop)}
    for op in function.block_specializations[function.opset].operations:
        if op.type == "const" and op.outputs[0].name in numbers:
            axis, number = numbers[op.outputs[0].name]
            op.attributes["val"].immediateValue.tensor.ints.values[axis] = number


def emit(name: str, label: str, parts: Parts) -> Any:
    """A weight as an op of coremltools."""
    made = {}
    for part, value in parts.items():
        made[part] = mb.const(val=value, name=name if part == "weight" else f"{name}_{part}")
        made[part].op.weight_id = f"{label}.{part}"
    if "weight" in made:
        return made["weight"].op
    if "lut" not in made:
        return mb.constexpr_blockwise_shift_scale(**made, name=name).op
    if parts["lut"].shape[-1] > 1:  # vectors lie along the output channels
        made["vector_axis"] = mb.const(val=np.int32(0), name=f"{name}_vector_axis")
    return mb.constexpr_lut_to_dense(**made, name=name).op


def parts_of(encoded: Encoded) -> Parts:
    """A constant as arrays of coremltools' types; narrow integers take a byte each."""
    parts = encoded.arrays
    if isinstance(encoded, Affine):
        parts["data"] = encoded.data.astype(narrow("int", encoded.bits))
    elif isinstance(encoded, Palettized):
        parts["indices"] = encoded.indices.astype(narrow("uint", encoded.bits))
    return parts


def narrow(kind: str, bits: int) -> Any:
    """coremltools' numpy type for integers of `bits` bits."""
    return types.nptype_from_builtin(types.string_to_builtin(f"{kind}{bits}"))
