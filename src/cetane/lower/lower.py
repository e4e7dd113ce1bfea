"""torch -> MIL -> `.mlpackage`: one shard with all its functions."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cetane.compress import Encoded
from cetane.errors import CetaneError
from cetane.families.base import Weights
from cetane.families.flow import Input
from cetane.lower.package import normalize
from cetane.plan import Function, Planner
from cetane.quiet import import_coremltools

NUMPY = {"fp16": np.float16, "int32": np.int32}
TORCH = {"fp16": torch.float32, "int32": torch.int32}


def lower_shard(planner: Planner, weights: Weights, shard: str, target: Path) -> None:
    """Write the package of a shard to `target`, which must not exist.

    Loads the shard's weights, converts every function, compresses each weight once and joins the
    functions so that weights are stored once.
    """
    ct = import_coremltools()
    for block in planner.members[shard]:
        block.load(weights)
    encoded, halves = encode(planner, shard)
    functions = planner.function_widths()
    with quiet(), tempfile.TemporaryDirectory(dir=target.parent, prefix=".lower-") as scratch:
        paths = {}
        for name, tokens in functions.items():
            paths[name] = Path(scratch) / f"{name}.mlpackage"
            convert(planner, shard, name, tokens, encoded, halves).save(str(paths[name]))
        joint = Path(scratch) / "joint.mlpackage"
        if list(functions) == ["main"]:
            paths["main"].rename(joint)
        else:
            descriptor = ct.utils.MultiFunctionDescriptor()
            for name, path in paths.items():
                descriptor.add_function(str(path), "main", name)
            descriptor.default_function_name = next(iter(paths))
            ct.utils.save_multifunction(descriptor, str(joint))
        normalize(joint)
        joint.rename(target)
    for block in planner.members[shard]:
        block.to_empty(device="meta")


def encode(
    planner: Planner, shard: str
) -> tuple[dict[str, Encoded], dict[str, np.ndarray[Any, Any]]]:
    """Constants and fp16 values of a shard's compressible weights, by parameter path."""
    encoded: dict[str, Encoded] = {}
    halves: dict[str, np.ndarray[Any, Any]] = {}
    for index, block in enumerate(planner.members[shard]):
        for path, weight in block.weights():
            if weight.kind is None:
                continue
            chosen = planner.recipe.compression.format_for(weight.name, weight.kind)
            values = block.get_parameter(path).numpy().astype(np.float16)
            key = f"blocks.{index}.{path}"
            halves[key] = values
            try:
                encoded[key] = chosen.encode(values)
            except CetaneError as error:
                raise CetaneError(f"{weight.name}: {error.message}", error.hint) from error
    return encoded, halves


def convert(
    planner: Planner,
    shard: str,
    name: str,
    tokens: int,
    encoded: dict[str, Encoded],
    halves: dict[str, np.ndarray[Any, Any]],
) -> Any:
    """One function of a shard as a coremltools MLModel."""
    ct = import_coremltools()
    from cetane.lower import torch_ops  # noqa: F401, registers our ops
    from cetane.lower.constants import PASS

    function = planner.function(shard, name, tokens)
    module = planner.module(shard, tokens).eval()
    examples = tuple(torch.zeros(item.shape, dtype=TORCH[item.dtype]) for item in function.inputs)
    pipeline = ct.PassPipeline()
    # Equal weights stay apart until the encodings are placed; joining functions merges them.
    pipeline.remove_passes({"common::const_deduplication"})
    pipeline.append_pass(PASS)
    pipeline.set_options(PASS, {"encoded": encoded, "weights": halves})
    with torch.no_grad():
        traced = torch.jit.trace(module, examples, check_trace=False)
        model = ct.convert(
            traced,
            inputs=inputs(planner, shard, function, ct),
            outputs=[
                ct.TensorType(name=item.name, dtype=NUMPY[item.dtype]) for item in function.outputs
            ],
            states=[
                ct.StateType(ct.TensorType(shape=state.shape, dtype=np.float16), name=state.name)
                for spec in planner.specs(shard)
                for state in planner.contract.states(spec)
            ],
            minimum_deployment_target=getattr(ct.target, planner.recipe.target.deployment),
            compute_precision=ct.precision.FLOAT16,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            pass_pipeline=pipeline,
            skip_model_load=True,
        )
    return model


def inputs(planner: Planner, shard: str, function: Function, ct: Any) -> list[Any]:
    """Input types; where shapes are flexible, the sizes that grow with T are ranges."""
    if planner.recipe.tokens.shapes == "static":
        return [tensor_type(item, item.shape, ct) for item in function.inputs]
    most = max(planner.recipe.tokens.by_mode().values())
    widest = planner.function(shard, function.name, most)
    types = []
    ranges: dict[tuple[int, int], Any] = {}
    for item, wide in zip(function.inputs, widest.inputs, strict=True):
        shape = [
            low if low == high else ranges.setdefault((low, high), ct.RangeDim(low, high, low))
            for low, high in zip(item.shape, wide.shape, strict=True)
        ]
        types.append(tensor_type(item, tuple(shape), ct))
    return types


def tensor_type(item: Input, shape: tuple[Any, ...], ct: Any) -> Any:
    return ct.TensorType(name=item.name, shape=shape, dtype=NUMPY[item.dtype])


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no tracer warnings: the caller reports progress by shard."""
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
