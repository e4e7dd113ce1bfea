"""The conversion of one shard, with all its functions: torch -> MIL -> `.mlpackage`."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cetane.errors import CetaneError
from cetane.hardware.quiet import import_coremltools
from cetane.lower.converted import ConstantOf, Converted
from cetane.lower.package import WEIGHTS, normalize
from cetane.lower.patches import brief, quiet, uncollected
from cetane.lower.side_by_side import side_by_side
from cetane.lower.structure import Form, forms, functions_with_widest
from cetane.lower.tracing import labelled_weights, trace
from cetane.mil.dtypes import NUMPY
from cetane.planner import FunctionGraph, Programs
from cetane.schema.function import Function
from cetane.schema.interface import Input

IDLE = (
    "concat_to_pixel_shuffle", "detect_concat_interleave", "fuse_conv_batchnorm", "fuse_conv_scale",
    "fuse_elementwise_to_batchnorm", "fuse_gelu_tanh_approximation", "fuse_leaky_relu",
    "fuse_prelu", "prelu_to_lrelu", "use_reflection_padding",
)  # fmt: skip
"""Passes of coremltools that are left out: no family writes the patterns that they look for. Two of
them search whole programs, and take a tenth of all passes' time."""

Placed = dict[str, dict[str, str]]
"""The labels of a program's constants, by function and by the name of the op that makes each."""


class Conversions:
    """The converted functions of a planner's shards. Functions of one form share a conversion."""

    def __init__(self, planner: Programs) -> None:
        self.planner = planner
        self._forms: dict[str, list[Form]] = {}
        self._first: dict[tuple[str, ...], tuple[Form, Converted]] = {}

    def forms(self, shard: str) -> list[Form]:
        """The forms of a shard's functions."""
        if shard not in self._forms:
            self._forms[shard] = forms(self.planner, shard)
        return self._forms[shard]

    def of(self, shard: str) -> dict[str, Converted]:
        """The converted functions of a shard, by name."""
        every = [
            (form, partial(convert, self.planner, shard, graph, wide))
            for (graph, wide), form in zip(
                functions_with_widest(self.planner, shard), self.forms(shard), strict=True
            )
        ]
        new = {form.lines: (form, work) for form, work in reversed(every)
               if form.lines not in self._first}  # fmt: skip
        with uncollected():
            made = side_by_side([work for _, work in new.values()])
            for (form, _), converted in zip(new.values(), made, strict=True):
                self._first[form.lines] = form, converted
        return {form.name: self._of(form) or work() for form, work in every}

    def _of(self, form: Form) -> Converted | None:
        """The function of a form, from the conversion that all functions of this form share.

        None if that conversion does not tell which slices differ.
        """
        own, converted = self._first[form.lines]
        return converted if form is own else converted.renamed(own, form)


def convert_shard(
    planner: Programs,
    shard: str,
    constant: ConstantOf,
    target: Path,
    conversions: Conversions | None = None,
) -> Placed:
    """Write the package of a shard to `target`. Returns the labels of its constants.

    `constant` gives the weight of each label, and is called once for each. Without `conversions`,
    every function is converted by itself. Raises CetaneError if lowering loses a weight, or leaves
    one in fp32.
    """
    ct = import_coremltools()
    from cetane.lower.placing import Placing

    if conversions is None:
        converted = {
            graph.function.name: convert(planner, shard, graph, wide)
            for graph, wide in functions_with_widest(planner, shard)
        }
    else:
        converted = conversions.of(shard)
    version = next(iter(converted.values())).spec.specificationVersion
    opset = getattr(ct.target, planner.recipe.target.deployment)
    with tempfile.TemporaryDirectory() as folder:
        placing = Placing(constant, Path(folder), opset, version)
        placed = {name: placing.place(function) for name, function in converted.items()}
        for graph in planner.graphs(shard):
            wanted = {item.label for item in labelled_weights(planner, shard, graph)}
            lost = wanted - set(placed[graph.function.name][1].values())
            if lost:
                raise CetaneError(f"lowering {shard} lost the weight {min(lost)}")
        del placing  # which closes the weight file
        (Path(folder) / WEIGHTS.name).touch()  # none is there for small weights alone
        spec = package_spec(converted, {name: message for name, (message, _) in placed.items()})
        ct.utils.save_spec(spec, str(target), weights_dir=folder)
    normalize(target)
    return {name: labels for name, (_, labels) in placed.items()}


def convert(planner: Programs, shard: str, graph: FunctionGraph, wide: Function) -> Converted:
    """Convert one function of a shard; `wide` is the same at its largest number of tokens.

    Its weights are names without values. coremltools' errors pass unchanged.
    """
    ct = import_coremltools()
    from cetane.lower import frontend  # noqa: F401, registers our ops

    pipeline = ct.PassPipeline()
    pipeline.remove_passes({"common::const_deduplication"})  # `Placing` shares equal ones
    pipeline.remove_passes({f"common::{name}" for name in IDLE})
    function = graph.function
    with quiet():
        with brief(), uncollected():
            model = ct.convert(
                trace(planner, shard, graph),
                inputs=input_types(function, wide, ct),
                outputs=[
                    ct.TensorType(name=item.name, dtype=NUMPY[item.dtype])
                    for item in function.outputs
                ],
                states=[
                    ct.StateType(ct.TensorType(shape=state.shape, dtype=np.float16), state.name)
                    for state in function.states
                ],
                minimum_deployment_target=getattr(ct.target, planner.recipe.target.deployment),
                compute_precision=ct.precision.FLOAT16,
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                pass_pipeline=pipeline,
                skip_model_load=True,
            )
        program = model._mil_program
        program.validate()
    arrays = {
        op.outputs[0].name: np.ascontiguousarray(op.val.val)
        for op in program.functions["main"].operations
        if op.op_type == "const" and isinstance(op.val.val, np.ndarray)
    }
    return Converted(model.get_spec(), arrays)


def package_spec(functions: dict[str, Converted], finished: dict[str, Any]) -> Any:
    """The specification of a package: the interfaces of `functions`, and the `finished` protobuf
    messages of their programs; both by function name."""
    from coremltools.proto import MIL_pb2, Model_pb2

    first = next(iter(functions.values())).spec
    description = first.description
    if list(functions) != ["main"]:
        description = Model_pb2.ModelDescription(
            functions=[interface(name, c.spec.description) for name, c in functions.items()],
            defaultFunctionName=next(iter(functions)),
        )
    return Model_pb2.Model(
        specificationVersion=first.specificationVersion,
        description=description,
        mlProgram=MIL_pb2.Program(version=first.mlProgram.version, functions=finished),
    )


def interface(name: str, description: Any) -> Any:
    """A function's inputs, outputs and states, in the form for a package with several functions."""
    from coremltools.proto import Model_pb2

    return Model_pb2.FunctionDescription(
        name=name, input=description.input, output=description.output, state=description.state
    )


def input_types(function: Function, wide: Function, ct: Any) -> list[Any]:
    """coremltools' types of a function's inputs. A size that is larger in `wide` becomes a range;
    inputs share equal ranges."""
    types = []
    ranges: dict[tuple[int, int], Any] = {}
    for item, most in zip(function.inputs, wide.inputs, strict=True):
        shape = tuple(
            low if low == high else ranges.setdefault((low, high), ct.RangeDim(low, high, low))
            for low, high in zip(item.shape, most.shape, strict=True)
        )
        types.append(tensor_type(item, shape, ct))
    return types


def tensor_type(item: Input, shape: tuple[Any, ...], ct: Any) -> Any:
    """coremltools' type of an input; `shape` replaces the input's own."""
    return ct.TensorType(name=item.name, shape=shape, dtype=NUMPY[item.dtype])
