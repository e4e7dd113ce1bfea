"""Programs of real size without their weights: coremltools' builder makes the graph, and constants
are then put in as references to a weight file that is all hole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.input_type import InputSpec, TensorInputType
from coremltools.converters.mil.mil.ops.defs._op_reqs import register_op
from coremltools.proto import MIL_pb2
from tests.mil.conftest import build_program, ct, mb

from cetane.lower.package import MANIFEST, MODEL, WEIGHTS
from cetane.lower.patches import brief
from cetane.mil import load
from cetane.mil.blob import _DTYPES, _RECORD, _SENTINEL
from cetane.mil.dtypes import byte_count
from cetane.mil.program import Program

Body = Callable[..., Any]
Specs = Mapping[str, tuple[tuple[int, ...], str]]
FEW = 1 << 13
CODES = {"fp16": 10, "fp32": 11, "int8": 21, "int4": 25, "uint8": 31, "uint4": 35}


@register_op
class constexpr_test_weight(Operation):
    """A weight of a shape, stored in a form; `save` makes the real op of it."""

    input_spec = InputSpec(
        form=TensorInputType(const=True, type_domain=types.str),
        shape=TensorInputType(const=True, type_domain=types.str),
    )

    def type_inference(self) -> Any:
        return types.tensor(types.fp16, tuple(int(size) for size in self.shape.val.split("x")))


def weight(*shape: int, form: str = "fp16") -> Any:
    """A weight stored as `fp16`, `int8` or `int4` (per channel, or `-block32`), or as a palette of
    groups of 32 channels `lut4`, `lut8` (or `-tensor`, `-channel`, `-block`, `-int8`, `-pairs`)."""
    return mb.constexpr_test_weight(form=form, shape="x".join(map(str, shape)))


def conv(x: Any, outputs: int, form: str = "fp16", **options: Any) -> Any:
    """A 1x1 convolution of x to `outputs` channels."""
    return mb.conv(x=x, weight=weight(outputs, x.shape[1], 1, 1, form=form), **options)


@dataclass
class Model:
    """What a test builds: a body of inputs and states, and what makes it special."""

    body: Body
    inputs: Specs = field(default_factory=lambda: {"x": ((1, 64, 1, 8), "fp16")})
    states: Specs = field(default_factory=dict)
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Axes of x that are ranges."""
    enumerated: tuple[tuple[int, ...], ...] = ()
    """All shapes of x."""
    edit: Callable[[Any], None] = lambda block: None
    """Makes of the finished body what coremltools itself would refuse, or takes too long for."""
    compress: Callable[[Any], Any] = lambda model: model
    """What coremltools makes of the converted model."""
    functions: int = 1
    """How many functions of this body the package has."""
    target: Any = ct.target.iOS18
    chip: str = "m4-max"
    os: float = 26

    def program(self, folder: Path) -> Program:
        """The program as a package in `folder`, read again."""
        program = build_program(self.inputs, self.body, self.states, self.target)
        with brief():
            model = ct.convert(
                program,
                convert_to="mlprogram",
                minimum_deployment_target=self.target,
                compute_precision=ct.precision.FLOAT32,
                pass_pipeline=ct.PassPipeline.EMPTY,
                skip_model_load=True,
            )
            model = self.compress(model)
        spec = model.get_spec()
        for function in spec.mlProgram.functions.values():
            block = function.block_specializations[function.opset]
            for op in block.operations:
                if op.type == "constexpr_test_weight":
                    store(op)
            self.edit(block)
        self._make_flexible(spec)
        for index in range(1, self.functions):
            main = spec.mlProgram.functions["main"]
            spec.mlProgram.functions[f"more-{index}"].CopyFrom(main)
        return write(spec, folder, Path(model.weights_dir) / WEIGHTS.name)

    def _make_flexible(self, spec: Any) -> None:
        if not self.ranges and not self.enumerated:
            return
        axes = self.ranges or {len(self.enumerated[0]) - 1: (0, 0)}
        (x,) = (item for item in spec.mlProgram.functions["main"].inputs if item.name == "x")
        for axis in axes:
            x.type.tensorType.dimensions[axis].unknown.variadic = False
        (feature,) = (item for item in spec.description.input if item.name == "x")
        array = feature.type.multiArrayType
        for shape in self.enumerated:
            array.enumeratedShapes.shapes.add(shape=shape)
        for axis, size in enumerate(array.shape if self.ranges else ()):
            low, high = self.ranges.get(axis, (size, size))
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


def write(spec: Any, folder: Path, weights: Path | None = None) -> Program:
    """A specification as a package, read again; `weights` are those that coremltools wrote."""
    path = folder / "model.mlpackage"
    for file in (MODEL, WEIGHTS):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / WEIGHTS).write_bytes(weights.read_bytes() if weights and weights.exists() else b"")
    place_zeros(spec, path / WEIGHTS)
    (path / MODEL).write_bytes(spec.SerializeToString())
    entry = dict.fromkeys(("author", "description", "name"), "a test's")
    entry["path"] = MODEL.relative_to("Data").as_posix()
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": {"model": entry},
        "rootModelIdentifier": "model",
    }
    (path / MANIFEST).write_text(json.dumps(manifest))
    return load(path)


def place_zeros(spec: Any, file: Path) -> None:
    """Give every weight without a place one in the weight file: a record of its own, and zeros that
    all of them share. The file is sparse."""
    codes = {CODES[name]: code for code, name in _DTYPES.items() if name in CODES}
    values = [
        (value, value.type.tensorType)
        for function in spec.mlProgram.functions.values()
        for body in function.block_specializations.values()
        for op in body.operations
        for value in (
            *op.attributes.values(),
            *(binding.value for given in op.inputs.values() for binding in given.arguments),
        )
        if value.blobFileValue.fileName and not value.blobFileValue.offset
    ]
    first = -(-file.stat().st_size // 64) * 64 + 64
    zeros = first + 64 * len(values)
    longest = 0
    with file.open("r+b") as data:
        for index, (value, tensor) in enumerate(values):
            shape = tuple(size.constant.size for size in tensor.dimensions)
            names = {code: name for name, code in CODES.items()}
            size = byte_count(names[tensor.dataType], shape)
            longest = max(longest, size)
            value.blobFileValue.offset = first + 64 * index
            data.seek(value.blobFileValue.offset)
            data.write(_RECORD.pack(_SENTINEL, codes[tensor.dataType], size, zeros))
        if values:
            data.truncate(zeros + longest)


def store(op: Any) -> None:
    """Make a `const` or `constexpr_*` op of a placeholder, in place."""
    given = {
        name: op.attributes.pop(name).immediateValue.tensor.strings.values[0]
        for name in ("form", "shape")
    }
    shape = [int(size) for size in given["shape"].split("x")]
    form, _, detail = given["form"].partition("-")
    if form == "fp16":
        op.type = "const"
        op.attributes["val"].CopyFrom(blob("fp16", shape))
    elif form in ("int8", "int4"):
        op.type = "constexpr_blockwise_shift_scale"
        add(op, "data", blob(form, shape))
        scales = [shape[0], *([1] * (len(shape) - 1))]
        scales[1] = shape[1] // int(detail[5:]) if detail.startswith("block") else 1
        add(op, "scale", blob("fp16", scales))
    else:
        bits = int(form.removeprefix("lut"))
        groups = [1] * len(shape)
        sizes = {"tensor": shape[0], "channel": 1}
        groups[0] = max(1, shape[0] // sizes.get(detail, 32))
        groups[1] = shape[1] // 32 if detail == "block" else 1
        op.type = "constexpr_lut_to_dense"
        vector = 2 if detail == "pairs" else 1
        add(op, "indices", blob(f"uint{bits}", [shape[0] // vector, *shape[1:]]))
        entries = "int8" if detail == "int8" else "fp16"
        add(op, "lut", blob(entries, [*groups, 1 << bits, vector]))
        op.outputs[0].type.tensorType.dataType = CODES[entries]
        if vector > 1:
            axis = MIL_pb2.Value()
            axis.type.tensorType.dataType = MIL_pb2.DataType.INT32
            axis.immediateValue.tensor.ints.values.append(0)
            add(op, "vector_axis", axis)


def add(op: Any, name: str, value: Any) -> None:
    op.inputs[name].arguments.add().value.CopyFrom(value)


def blob(dtype: str, shape: list[int]) -> Any:
    """A constant that lies in the weight file; zeros in the value itself if there are few."""
    value = MIL_pb2.Value()
    tensor = value.type.tensorType
    tensor.dataType, tensor.rank = CODES[dtype], len(shape)
    for size in shape:
        tensor.dimensions.add().constant.size = size
    if dtype == "fp16" and prod(shape) <= FEW:
        value.immediateValue.tensor.bytes.values = bytes(2 * prod(shape))
    else:
        value.blobFileValue.fileName = "@model_path/weights/weight.bin"
    return value
