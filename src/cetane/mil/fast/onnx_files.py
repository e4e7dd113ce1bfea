"""Programs as ONNX files."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import ModelProto, TensorProto, helper

from cetane.errors import CetaneError
from cetane.mil.fast.arrays import align
from cetane.mil.fast.model import model
from cetane.mil.fast.onnx_graph import OnnxGraph, OnnxWeight, onnx_type
from cetane.mil.fast.translate import translate, unsupported
from cetane.mil.program import MilFunction, Program

WEIGHTS = "weights.bin"
_Place = tuple[int, int, int]


def export(
    program: Program, folder: Path, progress: Callable[[str, int, int], None]
) -> dict[str, Path]:
    """Write every function of a program as `NAME.onnx`, with `weights.bin` for all of them.

    The graphs follow the program op for op, with standard ONNX operators, in float32. Weights that
    fit fp16 are stored in fp16 and cast. Functions that share a weight store it once. A state
    becomes an input of its name and an output `NAME_out`. Raises CetaneError that names an op
    without an ONNX form.
    """
    graphs = {name: _translated(function) for name, function in program.functions.items()}
    files, places = {}, dict[Hashable, _Place]()
    with (folder / WEIGHTS).open("wb") as data:
        for index, (name, graph) in enumerate(graphs.items()):
            progress(name, index, len(graphs))
            proto = _standalone(program.functions[name], graph)
            for initializer, weight in zip(_supplied(proto), graph.weights.values(), strict=True):
                if weight.key not in places:
                    places[weight.key] = _append(data, weight)
                _refer(proto, initializer, places[weight.key])
            files[name] = folder / f"{name}.onnx"
            files[name].write_bytes(proto.SerializeToString())
    progress("done", len(graphs), len(graphs))
    return files


def _translated(function: MilFunction) -> OnnxGraph:
    """The graph of a function. No other executor helps an export, so the refusal names none."""
    if missing := unsupported(function):
        raise CetaneError(
            f"function {function.name} has ops without an ONNX form in cetane: "
            f"{', '.join(missing)}",
            "write the model that it was converted from as ONNX, for example with torch.onnx",
        )
    return translate(function)


def _standalone(function: MilFunction, graph: OnnxGraph) -> ModelProto:
    """A model whose outputs have the program's names and types."""
    proto = model([graph])
    del proto.graph.output[:]
    types = {**function.outputs, **function.states}
    for name, result in graph.outputs.items():
        output = f"{name}_out" if name in function.states else name
        proto.graph.node.append(helper.make_node("Identity", [result], [output]))
        shape = types[name].static_shape
        info = helper.make_tensor_value_info(output, onnx_type(types[name].dtype), shape)
        proto.graph.output.append(info)
    return proto


def _supplied(proto: ModelProto) -> list[TensorProto]:
    return [t for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]


def _append(data: BinaryIO, weight: OnnxWeight) -> _Place:
    """Write a weight. Returns its element type in the file, its offset and its bytes."""
    array, element = weight.array(), weight.element
    if element == TensorProto.FLOAT:
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if np.array_equal(half, array):
            array, element = half, TensorProto.FLOAT16
    align(data)
    offset = data.tell()
    data.write(array.data)
    return element, offset, array.nbytes


def _refer(proto: ModelProto, initializer: TensorProto, place: _Place) -> None:
    """Point an initializer at its place in the file."""
    element, offset, length = place
    del initializer.external_data[:]
    for key, value in {"location": WEIGHTS, "offset": offset, "length": length}.items():
        initializer.external_data.add(key=key, value=str(value))
    if element != initializer.data_type:
        wanted, name = initializer.data_type, initializer.name
        initializer.name, initializer.data_type = f"{name}_stored", element
        proto.graph.node.insert(0, helper.make_node("Cast", [f"{name}_stored"], [name], to=wanted))
