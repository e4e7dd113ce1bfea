"""ONNX models of graphs. Functions whose graphs are alike share one model.

The functions of a package mostly differ only in sizes (one token, four, sixty-four). One session
for all of them holds the weights once, in the form into which onnxruntime packs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from cetane.mil.fast.onnx_graph import MICROSOFT, OnnxGraph, Tensor, onnx_type

_OPSET, _IR_VERSION = 21, 10


def alike(one: OnnxGraph, other: OnnxGraph) -> bool:
    """Whether two graphs differ only in sizes of inputs and in values of small constants."""
    return (
        one.nodes == other.nodes
        and one.weights == other.weights
        and one.views == other.views
        and one.outputs == other.outputs
        and _ranks(one.inputs) == _ranks(other.inputs)
        and {n: (a.dtype, a.ndim) for n, a in one.literals.items()}
        == {n: (a.dtype, a.ndim) for n, a in other.literals.items()}
    )


def differing_literals(graphs: Sequence[OnnxGraph]) -> list[str]:
    """The names of small constants that differ between graphs that are alike."""
    first, *others = graphs
    return [
        name
        for name, array in first.literals.items()
        if not all(np.array_equal(array, other.literals[name]) for other in others)
    ]


def model(graphs: Sequence[OnnxGraph]) -> ModelProto:
    """One model for graphs that are alike.

    Constants that differ become inputs. Weights are named but not included; the session's maker
    supplies them. Nodes have the names of the first graph's ops.
    """
    first = graphs[0]
    variable = differing_literals(graphs)
    proto = GraphProto(name="function")
    for node in first.nodes:
        proto.node.append(
            helper.make_node(
                node.kind, node.inputs, node.outputs, node.name, **dict(node.attributes)
            )
        )
    for name in first.inputs:
        proto.input.append(_input(name, [graph.inputs[name] for graph in graphs]))
    for name in variable:
        array = first.literals[name]
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        same = all(graph.literals[name].shape == array.shape for graph in graphs)
        shape = array.shape if same else [None] * array.ndim
        proto.input.append(helper.make_tensor_value_info(name, element, shape))
    for name, array in first.literals.items():
        if name not in variable:
            proto.initializer.append(numpy_helper.from_array(array, name))
    for name, weight in first.weights.items():
        placeholder = TensorProto(name=name, data_type=weight.element, dims=weight.shape)
        placeholder.data_location = TensorProto.EXTERNAL
        placeholder.external_data.add(key="location", value="supplied")
        proto.initializer.append(placeholder)
    for name in first.outputs.values():
        proto.output.append(ValueInfoProto(name=name))
    opsets = [helper.make_opsetid("", _OPSET)]
    if any(dict(node.attributes).get("domain") == MICROSOFT for node in first.nodes):
        opsets.append(helper.make_opsetid(MICROSOFT, 1))
    return helper.make_model(proto, opset_imports=opsets, ir_version=_IR_VERSION)


def _input(name: str, forms: Sequence[Tensor]) -> ValueInfoProto:
    """An input of the model. Sizes that change together between functions share a symbol."""
    shape: list[int | str | None] = []
    for sizes in zip(*(form.shape for form in forms), strict=True):
        fixed = [size for size in sizes if isinstance(size, int)]
        if len(fixed) < len(sizes):
            shape.append(None)
        else:
            shape.append(fixed[0] if len(set(fixed)) == 1 else "or".join(map(str, fixed)))
    return helper.make_tensor_value_info(name, onnx_type(forms[0].dtype), shape)


def _ranks(inputs: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (tensor.rank, onnx_type(tensor.dtype)) for name, tensor in inputs.items()}
