"""The conversion of one shard, with all its functions: torch -> MIL -> `.mlpackage`."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from cetane.compress.encoded import Encoded
from cetane.errors import CetaneError
from cetane.hardware.quiet import import_coremltools
from cetane.lower.package import normalize
from cetane.lower.structure import widest
from cetane.lower.tracing import constants, trace
from cetane.planner import FunctionGraph, Programs
from cetane.schema.function import Function
from cetane.schema.interface import Input

NUMPY = {"fp16": np.float16, "int32": np.int32}

Constants = Callable[[str], Encoded]
"""A function that gives the constant of a label."""
Placed = dict[str, dict[str, str]]
"""The labels of a program's constants, by function and by the name of the op that makes each."""


@dataclass(frozen=True)
class Converted:
    """One function as a coremltools program whose weights have no values."""

    program: Any
    spec: Any


def convert_shard(planner: Programs, shard: str, constant: Constants, target: Path) -> Placed:
    """Write the package of a shard to `target`; `constant` gives the weight of each label.

    Each constant is read once, and all stay in memory until the package is written.
    """
    import_coremltools()
    from cetane.lower.placing import Parts, parts_of, place

    with quiet():
        with brief():
            done = {
                graph.function.name: convert(planner, shard, graph, wide)
                for graph, wide in zip(planner.graphs(shard), widest(planner, shard), strict=True)
            }

        @cache  # functions share the arrays
        def parts(label: str) -> Parts:
            return parts_of(constant(label))

        for converted in done.values():
            converted.program.validate()
        placed = {n: place(c.program.functions["main"], parts) for n, c in done.items()}
        for graph in planner.graphs(shard):
            wanted = {item.label for item in constants(planner, shard, graph)}
            lost = wanted - set(placed[graph.function.name].values())
            if lost:
                raise CetaneError(f"lowering {shard} lost the weight {min(lost)}")
        export(done).save(str(target))
    normalize(target)
    return placed


def convert(planner: Programs, shard: str, graph: FunctionGraph, wide: Function) -> Converted:
    """One function of a shard."""
    ct = import_coremltools()
    from cetane.lower import frontend  # noqa: F401, registers our ops

    pipeline = ct.PassPipeline()
    pipeline.remove_passes({"common::const_deduplication"})  # constants are shared by name
    function = graph.function
    model = ct.convert(
        trace(planner, shard, graph),
        inputs=input_types(function, wide, ct),
        outputs=[
            ct.TensorType(name=item.name, dtype=NUMPY[item.dtype]) for item in function.outputs
        ],
        states=[
            ct.StateType(ct.TensorType(shape=state.shape, dtype=np.float16), name=state.name)
            for state in function.states
        ],
        minimum_deployment_target=getattr(ct.target, planner.recipe.target.deployment),
        compute_precision=ct.precision.FLOAT16,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=pipeline,
        skip_model_load=True,
    )
    return Converted(model._mil_program, model.get_spec())


def export(functions: dict[str, Converted]) -> Any:
    """One MLModel of all functions, like the result of coremltools' `save_multifunction`.

    That function would store and load every function with its weights. It also shares constants of
    nearly equal values; here constants are shared by name.
    """
    import_coremltools()
    from coremltools.converters.mil.mil import Program
    from coremltools.proto import Model_pb2

    first = next(iter(functions.values()))
    program = Program()
    for name, converted in functions.items():
        program.add_function(name, converted.program.functions["main"])
    description = first.spec.description
    if list(functions) != ["main"]:
        program.default_function_name = next(iter(functions))
        program.export_as_multifunction = True
        description = Model_pb2.ModelDescription(
            functions=[interface(name, c.spec.description) for name, c in functions.items()],
            defaultFunctionName=program.default_function_name,
        )
    return written(program, description, first.spec.specificationVersion)


def written(program: Any, description: Any, version: int) -> Any:
    """An MLModel of a finished coremltools program, on which no more passes run."""
    ct = import_coremltools()
    from coremltools.converters.mil.converter import mil_convert

    program.skip_all_passes = True
    return mil_convert(
        program,
        convert_from="milinternal",
        convert_to="mlprogram",
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        specification_version=version,
        model_description=description,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )


def interface(name: str, description: Any) -> Any:
    """A function's inputs, outputs and states, in the form for a package with several functions."""
    from coremltools.proto import Model_pb2

    return Model_pb2.FunctionDescription(
        name=name, input=description.input, output=description.output, state=description.state
    )


def input_types(function: Function, wide: Function, ct: Any) -> list[Any]:
    """Input types. With flexible shapes, the sizes that grow with T are ranges."""
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
    return ct.TensorType(name=item.name, shape=shape, dtype=NUMPY[item.dtype])


@contextmanager
def quiet() -> Iterator[None]:
    """A context without progress bars and tracer warnings: the caller reports progress by shard."""
    import coremltools.converters.mil.frontend.torch.ops as torch_frontend
    import coremltools.converters.mil.mil.passes.pass_pipeline as passes

    def silent(iterable: Any, *_: Any, **__: Any) -> Any:
        return iterable

    saved = torch_frontend._tqdm, passes.tqdm
    torch_frontend._tqdm, passes.tqdm = silent, silent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_frontend._tqdm, passes.tqdm = saved


@contextmanager
def brief() -> Iterator[None]:
    """A context for conversions in less than half the time.

    coremltools checks a program after each of some 110 passes. Here it does not: the caller checks
    the finished program. After each pass it also finds anew which weights every value depends on.
    Here it does so only if the inputs of an op have changed since: most passes change nothing. It
    writes whole programs into log lines that nobody reads; here they are empty. Its collections of
    garbage search only what was made since the context began.
    """
    from coremltools.converters.mil.mil import Block, Operation, Program

    def trusted(program: Any, check_essential_scope: bool = False) -> None:
        """In place of `Program.validate`."""

    def unsaid(block: Any, indent: str | None = None, print_attr: bool | None = False) -> str:
        """In place of `Block.indented_str`."""
        return ""

    changes = count()
    latest = next(changes)
    known: dict[Any, int] = {}
    """The latest change when a block's dependencies were found."""

    def connect(op: Any, *given: Any, **named: Any) -> None:
        """`Operation._validate_and_set_inputs`, through which every input of an op is set."""
        nonlocal latest
        latest = next(changes)
        connected(op, *given, **named)

    def depend(block: Any) -> None:
        """`Block._propagate_nonreplaceable_vars`, if it has anything to do."""
        if known.get(block) != latest:
            depended(block)
            known[block] = latest

    connected, depended = Operation._validate_and_set_inputs, Block._propagate_nonreplaceable_vars
    replaced = [
        (Program, "validate", trusted),
        (Block, "indented_str", unsaid),
        (Block, "_propagate_nonreplaceable_vars", depend),
        (Operation, "_validate_and_set_inputs", connect),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, instead in replaced:
        setattr(owner, name, instead)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        for owner, name, before in saved:
            setattr(owner, name, before)
