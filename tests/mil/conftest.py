"""Builds small packages with coremltools' own builder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cetane.hardware.quiet import import_coremltools
from cetane.lower.patches import brief

ct = import_coremltools()

from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import Function as MilFunction  # noqa: E402
from coremltools.converters.mil.mil import Program as MilProgram  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

Build = Callable[..., Path]

DTYPES = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32, "int8": types.int8}


def build_program(
    inputs: Mapping[str, tuple[tuple[int, ...], str]],
    body: Callable[..., Any],
    states: Mapping[str, tuple[tuple[int, ...], str]],
    target: Any,
) -> Any:
    """A coremltools program with one function; `body` gets its inputs and states by name."""
    placeholders = {
        name: mb.placeholder(shape, DTYPES[dtype]) for name, (shape, dtype) in inputs.items()
    }
    placeholders |= {
        name: mb.state_tensor_placeholder(shape, DTYPES[dtype])
        for name, (shape, dtype) in states.items()
    }
    with MilFunction(placeholders, opset_version=target) as function:
        outputs = body(**function.inputs)
        function.set_outputs(list(outputs) if isinstance(outputs, (tuple, list)) else [outputs])
    program = MilProgram()
    program.add_function("main", function)
    return program


def save_program(
    folder: Path,
    inputs: Mapping[str, tuple[tuple[int, ...], str]],
    body: Callable[..., Any],
    states: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    target: Any = ct.target.iOS18,
) -> Path:
    """Save a program as a package, op for op as it was written (no optimisation passes)."""
    program = build_program(inputs, body, states or {}, target)
    with brief():
        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=target,
            compute_precision=ct.precision.FLOAT32,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    path = folder / "model.mlpackage"
    model.save(str(path))
    return path


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`save_program` into a folder of its own."""
    return lambda *program, **options: save_program(
        tmp_path_factory.mktemp("package"), *program, **options
    )
