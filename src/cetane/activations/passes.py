"""coremltools' passes that put `quantize` and `dequantize` around ops with int8 arithmetic.

They run on all functions of a package at once. coremltools' own entry point takes one function, and
ends with its whole default pipeline. That takes 92 % of the time and is of no use here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cetane.activations.calibrate import Ranges
from cetane.errors import CetaneError
from cetane.hardware.quiet import import_coremltools
from cetane.lower.package import WEIGHTS, normalize, read_spec
from cetane.lower.patches import patched, quiet

Tensors = Literal["inputs", "all"]
"""What is quantized: inputs of convolutions except gated products, or all their inputs and outputs.

The largest values of a gated product set its scale, and no turn of the residual stream spreads them
(docs/explanation/activations.md)."""
MOVING = {"cast", "concat", "expand_dims", "reshape", "slice_by_index", "split", "squeeze",
          "transpose"}  # fmt: skip
"""Ops that only move values."""


def quantize_package(
    package: Path, ranges: Ranges, tensors: Tensors, additions: bool, target: Path
) -> int:
    """Write `package` to `target` with symmetric int8 activations, one scale for each tensor.

    The scales come from `ranges`. With `additions`, what additions read is quantized too. Weights
    stay unchanged. Returns the number of quantized tensors in a function. Raises CetaneError for a
    tensor without a range, and for a package that is already quantized.
    """
    import_coremltools()  # quietly, before its parts
    import coremltools.optimize.coreml as cto
    from coremltools.converters.mil.frontend.milproto.load import load
    from coremltools.converters.mil.mil.passes.graph_pass import PassOption
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
    from coremltools.optimize.coreml import _quantization_passes as module

    spec = read_spec(package)
    program = load(spec, spec.specificationVersion, str((package / WEIGHTS).parent))
    if count_ops(program, "quantize"):
        raise CetaneError(f"{package.name}: its activations are quantized already")
    program.default_function_name = spec.description.defaultFunctionName
    program.export_as_multifunction = True
    symmetric = cto.OpLinearQuantizerConfig(mode="linear_symmetric")
    inputs_only = tensors == "inputs"
    config = cto.OptimizationConfig(
        global_config=symmetric,
        op_type_configs={} if additions else {"add": None},
        op_name_configs=dict.fromkeys(gated_readers(program)) if inputs_only else {},
    )
    options = [PassOption("config", config), PassOption("activation_stats", ranges)]
    with patched([(module, "tqdm", lambda ops, **_: ops)]):
        for side in ("prefix",) if inputs_only else ("prefix", "suffix"):
            insertion = PASS_REGISTRY[f"compression::insert_{side}_quantize_dequantize_pair"]
            insertion.set_options(options)
            try:
                insertion.apply(program)
            except KeyError as error:
                raise CetaneError(f"{package.name}: no range of {error} was found") from error
    for name in ("dequantize_quantize_pair_elimination", "remove_redundant_ops",
                 "dead_code_elimination"):  # fmt: skip
        PASS_REGISTRY[f"common::{name}"].apply(program)
    for function in program.functions.values():
        share_constants(function)
    with quiet():
        model_of(program, spec.description, spec.specificationVersion).save(str(target))
    normalize(target)
    return count_ops(program, "quantize")


def share_constants(function: Any) -> None:
    """Let functions share constants that are not weights: constants with one id are stored once."""
    from cetane.lower.recorder import content_of

    for op in function.operations:
        if op.op_type == "const" and op.weight_id is None and isinstance(op.val.val, np.ndarray):
            op.weight_id = content_of(np.ascontiguousarray(op.val.val))


def model_of(program: Any, description: Any, version: int) -> Any:
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


def count_ops(program: Any, kind: str) -> int:
    """The number of ops of a kind in the first of a program's functions."""
    first = next(iter(program.functions.values()))
    return sum(op.op_type == kind for op in first.operations)


def gated_readers(program: Any) -> Iterator[str]:
    """The names of all convolutions that read a gated product."""
    for function in program.functions.values():
        for op in function.operations:
            if op.op_type == "conv" and is_gated(op.x):
                yield op.name


def is_gated(value: Any) -> bool:
    """Whether a value comes from a product of two computed tensors of one shape."""
    maker = value.op
    if maker is None:
        return False
    if maker.op_type in MOVING:
        return any(map(is_gated, operands_of(maker)))
    factors = operands_of(maker)
    return (
        maker.op_type == "mul"
        and len({tuple(one.shape) for one in factors}) == 1
        and all(one.val is None for one in factors)
    )


def operands_of(op: Any) -> list[Any]:
    """The values that an op computes with."""
    listed = op.inputs.get("values")
    return (
        list(listed)
        if listed is not None
        else [value for key, value in op.inputs.items() if key in ("x", "y")]
    )
