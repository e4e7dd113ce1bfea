"""Constants and decoded weights, bit for bit those of coremltools' own optimizers."""

from functools import cache
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.optimize._utils import lut_to_dense

from cetane.compress import parse_format
from cetane.compress.encoded import Affine, Palettized

SHAPE = (16, 6, 1, 3)


def weight(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    values = {
        "normal": lambda: rng.normal(0, 0.05, SHAPE),
        "heavy": lambda: rng.standard_t(1.5, SHAPE),
        "scaled": lambda: rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-5, 4, (SHAPE[0], 1, 1, 1)),
        "positive": lambda: rng.uniform(3, 4, SHAPE),
    }[kind]()
    return values.astype(np.float16)


KINDS = ["normal", "heavy", "scaled", "positive"]


@cache
def model(kind: str) -> Any:
    """A convolution with this weight, as a Core ML model."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, SHAPE[1], 1, 8), dtype=ct.converters.mil.mil.types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any) -> Any:
        return mb.conv(x=x, weight=weight(kind))

    return ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)


def constants(compressed: Any, op_type: str) -> Any:
    """The one operation of this type in a compressed model."""
    (op,) = compressed._mil_program.functions["main"].find_ops(op_type=op_type)
    return op


@pytest.mark.parametrize("per", ["channel", "tensor", "block3"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind: str, bits: int, per: str) -> None:
    config = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric",
        dtype=f"int{bits}",
        granularity="per_block" if per == "block3" else f"per_{per}",
        block_size=3,
        weight_threshold=0,
    )
    compressed = cto.linear_quantize_weights(
        model(kind), cto.OptimizationConfig(global_config=config)
    )
    op = constants(compressed, "constexpr_blockwise_shift_scale")

    encoded = parse_format(f"int{bits}-per-{per}").encode(weight(kind))
    assert isinstance(encoded, Affine)
    assert op.offset is None
    assert encoded.scale.dtype == op.scale.val.dtype
    np.testing.assert_array_equal(encoded.data, op.data.val.astype(np.int8))
    np.testing.assert_array_equal(encoded.scale, op.scale.val)
    assert encoded.scale.shape == op.scale.val.shape
    np.testing.assert_array_equal(encoded.decode(), op.materialized_val_inference())


@pytest.mark.parametrize("per", ["group4", "per-tensor"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_palettes(kind: str, bits: int, per: str) -> None:
    grouped = per != "per-tensor"
    config = cto.OpPalettizerConfig(
        mode="uniform",
        nbits=bits,
        granularity="per_grouped_channel" if grouped else "per_tensor",
        group_size=4 if grouped else 0,
        weight_threshold=0,
    )
    compressed = cto.palettize_weights(model(kind), cto.OptimizationConfig(global_config=config))
    op = constants(compressed, "constexpr_lut_to_dense")

    encoded = parse_format(f"palette{bits}-uniform-{per}").encode(weight(kind))
    assert isinstance(encoded, Palettized)
    assert encoded.lut.shape == op.lut.val.shape
    assert encoded.lut.tobytes() == op.lut.val.tobytes()
    np.testing.assert_array_equal(encoded.indices, op.indices.val.astype(np.uint8))
    np.testing.assert_array_equal(encoded.decode(), op.materialized_val_inference())


@pytest.mark.parametrize("name", ["palette4-kmeans-group4", "palette3-kmeans-per-tensor"])
def test_kmeans_palettes_are_decoded_alike(name: str) -> None:
    encoded = parse_format(name).encode(weight("normal"))
    assert isinstance(encoded, Palettized)
    np.testing.assert_array_equal(encoded.decode(), lut_to_dense(encoded.indices, encoded.lut))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_packed_indices_are_the_bytes_of_the_file(bits: int, tmp_path: Path) -> None:
    encoded = parse_format(f"palette{bits}-uniform-group4").encode(weight("normal"))
    assert isinstance(encoded, Palettized)
    dtype = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))

    @mb.program(
        input_specs=[mb.TensorSpec((1, SHAPE[1], 1, 8), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any) -> Any:
        constant = mb.constexpr_lut_to_dense(indices=encoded.indices.astype(dtype), lut=encoded.lut)
        return mb.conv(x=x, weight=constant)

    package = tmp_path / "model.mlpackage"
    ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(
        str(package)
    )
    (file,) = package.rglob("weight.bin")
    # A header of 64 bytes, then for each blob 64 of metadata with its size and offset.
    # https://github.com/apple/coremltools/blob/main/mlmodel/src/MILBlob/Blob/StorageFormat.hpp
    blobs, content = [], file.read_bytes()
    position = 64
    for _ in range(int.from_bytes(content[:4], "little")):
        size, offset = (int.from_bytes(content[position + at :][:8], "little") for at in (8, 16))
        blobs.append(content[offset : offset + size])
        position = -(-(offset + size) // 64) * 64
    assert encoded.packed().tobytes() in blobs
