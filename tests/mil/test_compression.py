"""Decoded constants against coremltools' own decompression."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.optimize import _utils as coremltools_utils
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cetane.mil import Executable, Program, load
from cetane.mil.dtypes import unpack
from cetane.mil.ops import OPS
from cetane.mil.program import Precision

IN, OUT = 32, 24
WEIGHT = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


@given(st.sampled_from([1, 2, 3, 4, 6]), st.data())
def test_unpack_inverts_coremltools_packing(bits: int, data: st.DataObject) -> None:
    elements = data.draw(arrays(np.uint8, st.integers(1, 40), elements=st.integers(0, 2**bits - 1)))
    packed = coremltools_utils.pack_elements_into_bits(elements, bits)
    np.testing.assert_array_equal(unpack(packed, bits, len(elements)), elements)


@pytest.fixture(scope="module")
def models() -> Callable[[Any], Any]:
    """A linear layer without compression, for a deployment target."""

    def convert(target: Any) -> Any:
        model = torch.nn.Linear(IN, OUT, bias=False)
        model.weight.data = WEIGHT
        return ct.convert(
            torch.jit.trace(model, torch.zeros(1, IN)),
            inputs=[ct.TensorType("x", shape=(1, IN))],
            outputs=[ct.TensorType("y")],
            minimum_deployment_target=target,
            skip_model_load=True,
        )

    return convert


def weight_of(program: Program, precision: Precision = "fp16") -> np.ndarray:
    """The layer's weight as the executor decodes it: y = x W^T for every unit vector x."""
    run = Executable(program.functions["main"], precision)
    return np.stack([run({"x": row[None]})["y"][0] for row in np.eye(IN, dtype=np.float32)], 1)


def kinds(program: Program) -> set[str]:
    return {op.kind for op in program.functions["main"].ops if op.kind.startswith("constexpr_")}


def palettize(model: Any, joint_compression: bool = False, **options: Any) -> Any:
    config = cto.OpPalettizerConfig(mode="uniform", weight_threshold=0, **options)
    return cto.palettize_weights(model, cto.OptimizationConfig(config), joint_compression)


def quantize(model: Any, joint_compression: bool = False, **options: Any) -> Any:
    config = cto.OpLinearQuantizerConfig(weight_threshold=0, **options)
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(config), joint_compression)


def prune(model: Any) -> Any:
    config = cto.OpMagnitudePrunerConfig(target_sparsity=0.6, weight_threshold=0)
    return cto.prune_weights(model, cto.OptimizationConfig(config))


def sparse(then: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    return lambda model: then(prune(model), joint_compression=True, **options)


LUT, SHIFT = "constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"
SPARSE, SPARSE_LUT = "constexpr_sparse_to_dense", "constexpr_lut_to_sparse"
SPARSE_SHIFT = "constexpr_sparse_blockwise_shift_scale"
GROUPED = {"granularity": "per_grouped_channel", "group_size": 8}
FORMATS: dict[str, tuple[Any, Callable[[Any], Any], set[str]]] = {
    "palette-4": ("iOS18", lambda m: palettize(m, nbits=4), {LUT}),
    "palette-3": ("iOS18", lambda m: palettize(m, nbits=3), {LUT}),
    "palette-6-grouped": ("iOS18", lambda m: palettize(m, nbits=6, **GROUPED), {LUT}),
    "palette-4-grouped-axis-1": (
        "iOS18",
        lambda m: palettize(m, nbits=4, channel_axis=1, **GROUPED),
        {LUT},
    ),
    "palette-4-channel-scale": (
        "iOS18",
        lambda m: palettize(m, nbits=4, enable_per_channel_scale=True, **GROUPED),
        {LUT, SHIFT},
    ),
    "palette-of-int8": (
        "iOS18",
        lambda m: quantize(palettize(m, nbits=4), joint_compression=True, granularity="per_tensor"),
        {LUT, SHIFT},
    ),
    "int8-per-channel": ("iOS18", lambda m: quantize(m, mode="linear_symmetric"), {SHIFT}),
    "int8-per-tensor": ("iOS18", lambda m: quantize(m, granularity="per_tensor"), {SHIFT}),
    "int8-with-offset": ("iOS18", lambda m: quantize(m, mode="linear", dtype="int8"), {SHIFT}),
    "int4-per-block": (
        "iOS18",
        lambda m: quantize(m, granularity="per_block", block_size=8, dtype="int4"),
        {SHIFT},
    ),
    "uint4-per-block": (
        "iOS18",
        lambda m: quantize(m, mode="linear", granularity="per_block", block_size=8, dtype="uint4"),
        {SHIFT},
    ),
    "sparse": ("iOS18", prune, {SPARSE}),
    "sparse-palette": ("iOS18", sparse(palettize, nbits=4), {SPARSE, SPARSE_LUT}),
    "sparse-int8": ("iOS18", sparse(quantize), {SPARSE, SPARSE_SHIFT}),
    "iOS16-palette-4": ("iOS16", lambda m: palettize(m, nbits=4), {LUT}),
    "iOS16-palette-6": ("iOS16", lambda m: palettize(m, nbits=6), {LUT}),
    "iOS16-int8": ("iOS16", lambda m: quantize(m, mode="linear"), {"constexpr_affine_dequantize"}),
    "iOS16-sparse": ("iOS16", prune, {SPARSE}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_weights(name: str, models: Callable[[Any], Any], tmp_path: Path) -> None:
    target, compress, expected_kinds = FORMATS[name]
    compressed = compress(models(ct.target[target]))
    compressed.save(str(tmp_path / "compressed.mlpackage"))
    cto.decompress_weights(compressed).save(str(tmp_path / "plain.mlpackage"))

    program, plain = load(tmp_path / "compressed.mlpackage"), load(tmp_path / "plain.mlpackage")
    assert kinds(program) == expected_kinds
    assert not kinds(plain)
    decoded = weight_of(program)
    np.testing.assert_array_equal(decoded, weight_of(plain))
    np.testing.assert_array_equal(decoded, weight_of(program, "fp32"))  # typed fp16, so it is fp16
    assert np.abs(decoded - WEIGHT.numpy()).max() < 4  # and it is still the weight, roughly


def test_vector_palette_along_each_axis(build: Callable[..., Path]) -> None:
    """The example of the op's documentation."""
    indices = np.array([[[0, 0], [1, 0]], [[1, 1], [0, 0]]]).astype(types.np_uint1_dtype)
    lut = np.array([[1, 2, 3], [4, 5, 6]], np.float16).reshape(1, 1, 1, 2, 3)

    def body(x: Any) -> Any:
        return [
            mb.identity(
                x=mb.constexpr_lut_to_dense(indices=indices, lut=lut, vector_axis=np.int32(axis)),
                name=f"axis_{axis}",
            )
            for axis in (1, 2)
        ]

    run: Executable = Executable(load(build({"x": ((1,), "fp16")}, body)).functions["main"])
    outputs = run({"x": np.zeros(1, np.float16)})
    a, b = [1, 2, 3], [4, 5, 6]
    along_1 = np.array([[[*a, *b], [*a, *a]], [[*b, *a], [*b, *a]]]).swapaxes(1, 2)
    along_2 = np.array([[[*a, *a], [*b, *a]], [[*b, *b], [*a, *a]]])
    np.testing.assert_array_equal(outputs["axis_1"], along_1)
    np.testing.assert_array_equal(outputs["axis_2"], along_2)


def test_grouped_vector_palette() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 4, (4, 6)).astype(np.uint8)
    lut = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    for axis in (0, 1, -1):
        decoded = OPS[LUT].call(
            indices=torch.from_numpy(indices), lut=torch.from_numpy(lut), vector_axis=axis
        )
        expected = coremltools_utils.lut_to_dense(indices, lut, axis)
        np.testing.assert_array_equal(decoded, expected)


def test_constexpr_cast(build: Callable[..., Path]) -> None:
    half = np.linspace(-1, 1, 11).astype(np.float16)
    path = build(
        {"x": ((1,), "fp32")},
        lambda x: mb.identity(x=mb.constexpr_cast(source_val=half, output_dtype="fp32")),
        target=ct.target.iOS16,
    )
    (output,) = Executable(load(path).functions["main"], "fp16")({"x": np.zeros(1)}).values()
    assert output.dtype == np.float32
    np.testing.assert_array_equal(output, half)


def test_loading_leaves_weights_compressed(build: Callable[..., Path]) -> None:
    indices = np.arange(64).reshape(8, 8) % 16
    lut = np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1)
    path = build(
        {"x": ((1, 8), "fp16")},
        lambda x: mb.linear(
            x=x,
            weight=mb.constexpr_lut_to_dense(indices=indices.astype(types.np_uint4_dtype), lut=lut),
        ),
    )
    (decode,) = [op for op in load(path).functions["main"].ops if op.kind == LUT]
    (stored,) = decode.inputs["indices"]
    assert not isinstance(stored, str)
    assert stored.type.dtype == "uint4"
    np.testing.assert_array_equal(stored.numpy(), indices)


def test_every_decoder_is_covered() -> None:
    covered = {"constexpr_cast"}.union(*(kinds for _, _, kinds in FORMATS.values()))
    assert {kind for kind in OPS if kind.startswith("constexpr_")} == covered
