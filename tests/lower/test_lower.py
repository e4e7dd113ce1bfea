"""What is in the packages, read with coremltools."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load as load_milproto
from coremltools.proto.MIL_pb2 import DataType

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.names import model_name
from cetane.compress import parse_format
from cetane.compress.encoded import Affine, Dense, Palettized
from cetane.lower.lower import Lowering
from cetane.lower.package import EXPORTER
from cetane.planner import Planner
from cetane.schema.function import ShardPlan
from cetane.schema.recipe import Recipe

NAMES = {65552: "fp16", 131104: "int32"}  # ArrayFeatureType.ArrayDataType
CONVOLUTIONS = 7
"""A layer's projections: q, k, v, o, gate, up, down."""


def interfaces(spec: Any) -> dict[str, Any]:
    """The description of every function, by name; of a package with one, `main`."""
    several = {function.name: function for function in spec.description.functions}
    return several or {"main": spec.description}


def ports(features: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape (empty where the package says none) and dtype, by name."""
    arrays = {
        f.name: f.type.stateType.arrayType
        if f.type.HasField("stateType")
        else f.type.multiArrayType
        for f in features
    }
    return {name: (tuple(a.shape), NAMES[a.dataType]) for name, a in arrays.items()}


def operations(spec: Any) -> dict[str, list[Any]]:
    """The operations of every function."""
    return {
        name: list(function.block_specializations[function.opset].operations)
        for name, function in spec.mlProgram.functions.items()
    }


def packages(bundle: Bundle) -> Iterator[tuple[ShardPlan, Any]]:
    for shard in bundle.plan.shards:
        yield shard, ct.utils.load_spec(str(bundle.shard(shard.name)))


def weight_bytes(bundle: Bundle) -> int:
    return sum(path.stat().st_size for path in bundle.path.glob("shards/*/**/weight.bin"))


def mil_program(package: Path) -> Any:
    """The program as coremltools' own reader understands it."""
    spec = ct.utils.load_spec(str(package))
    weights = package / "Data/com.apple.CoreML/weights"
    return load_milproto(spec, spec.specificationVersion, str(weights))


def convolution_weights(package: Path) -> list[Any]:
    """The operations that make the weights of the convolutions of `main`, in order."""
    (function,) = mil_program(package).functions.values()
    return [op.weight.op for op in function.find_ops(op_type="conv")]


def decoded(op: Any) -> np.ndarray:
    return op.outputs[0].val if op.op_type == "const" else op.materialized_val_inference()


@pytest.fixture
def lower(
    tiny_checkpoint_folder: Path, tmp_path: Path, recipe: Callable[..., Recipe]
) -> Callable[..., Path]:
    """Lower the tiny model's one shard with one static function."""

    def make(name: str = "model", **options: Any) -> Path:
        checkpoint = open_checkpoint(tiny_checkpoint_folder)
        single = {"verify": None, "prefill": None, "shapes": "range", "layout": {"kind": "single"}}
        target = tmp_path / f"{name}.mlpackage"
        planner = Planner(checkpoint, recipe(**single | options))
        Lowering(planner, checkpoint).lower("model", target)
        return target

    return make


def test_interface_is_the_plan(variant: Bundle) -> None:
    for shard, spec in packages(variant):
        found = interfaces(spec)
        assert list(found) == [function.name for function in shard.functions]
        static = variant.plan.recipe.tokens.shapes == "static"
        for function in shard.functions:
            described = found[function.name]
            wanted = {item.name: (item.shape, item.dtype) for item in function.inputs}
            assert ports(described.input) == wanted
            outputs = ports(described.output)
            wanted = {item.name: (item.shape, item.dtype) for item in function.outputs}
            assert list(outputs) == list(wanted)
            for name, (shape, dtype) in outputs.items():
                assert dtype == wanted[name][1]
                assert shape == wanted[name][0] or (not static and shape == ())
            wanted = {state.name: (state.shape, state.dtype) for state in function.states}
            assert ports(described.state) == wanted


def test_reading_leaves_a_package_as_it_is(variant: Bundle) -> None:
    """coremltools rewrites the manifest of a package that it opens, and the bundle has its hash."""
    for shard in variant.plan.shards:
        ct.models.MLModel(str(variant.shard(shard.name)), skip_model_load=True)
    variant.verify()


def test_static_functions_are_one_for_every_mode(tiny_bundle: Callable[..., Bundle]) -> None:
    bundle = tiny_bundle(contract="stateful", layout={"kind": "single"}, tensor_layout="ct1",
                         head={"slices": 2})  # fmt: skip
    ((_, spec),) = packages(bundle)
    widths = {name: ports(f.input)["hidden"][0][2] for name, f in interfaces(spec).items()}
    assert widths == {"decode": 1, "verify": 3, "prefill": 8}
    assert spec.description.defaultFunctionName == "decode"


def test_ranges_cover_all_modes(tiny_bundle: Callable[..., Bundle]) -> None:
    bundle = tiny_bundle(
        contract="readonly", shapes="range", layout={"kind": "single"}, tensor_layout="ct1"
    )
    ((_, spec),) = packages(bundle)
    limits = {
        f.name: [(r.lowerBound, r.upperBound) for r in f.type.multiArrayType.shapeRange.sizeRanges]
        for f in spec.description.input
    }
    assert limits["hidden"] == [(1, 1), (64, 64), (1, 8), (1, 1)]
    assert limits["mask"] == [(1, 1), (1, 1), (1, 8), (65, 72)]
    assert limits["kv_k"] == []


def test_operations(variant: Bundle) -> None:
    """Per function: the ops an ANE compiler wants, none of what it does not, nothing in fp32."""
    plan = variant.plan
    for shard, spec in packages(variant):
        layers = sum(name.startswith("layer") for name in shard.blocks)
        heads = len(shard.blocks) - layers
        stateful = plan.recipe.cache.contract.startswith("stateful")
        for ops in operations(spec).values():
            kinds = Counter(op.type for op in ops)
            assert kinds["conv"] == CONVOLUTIONS * layers + heads
            assert kinds["layer_norm"] == 2 * layers + min(heads, 1)
            assert kinds["softmax"] == layers
            assert kinds["slice_update"] == (2 * layers if stateful else 0)
            assert kinds["linear"] == kinds["scatter_nd"] == kinds["rsqrt"] == 0
            dtypes = {out.type.tensorType.dataType for op in ops for out in op.outputs}
            assert DataType.FLOAT16 in dtypes
            assert not dtypes & {DataType.FLOAT32, DataType.FLOAT64}
        assert all(len(function.states) <= 2 for function in shard.functions)


def test_weights_are_stored_once(tiny_bundle: Callable[..., Bundle]) -> None:
    same = {"contract": "stateful", "layout": {"kind": "single"}}
    three = tiny_bundle(**same, tensor_layout="ct1", head={"slices": 2})
    one = tiny_bundle(**same, tensor_layout="ct1", head={"slices": 2}, verify=None, prefill=None)
    assert len(three.plan.shards[0].functions) == 3
    assert weight_bytes(three) < 1.02 * weight_bytes(one)
    assert one.plan.weight_bytes <= weight_bytes(one) < 1.05 * one.plan.weight_bytes


def test_lowering_twice_gives_the_same_bytes(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    bundle = tiny_bundle(contract="shift", layout={"kind": "single"}, prefill=None)
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    first, second = bundle.shard("model"), tmp_path / "second.mlpackage"
    named = {EXPORTER: model_name(checkpoint.source, checkpoint.config)}
    Lowering(Planner(checkpoint, bundle.plan.recipe), checkpoint, named).lower("model", second)
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert len(files) == 3
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


FORMATS = {
    "int8-per-channel": cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", granularity="per_channel", weight_threshold=0
    ),
    "int8-per-tensor": cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", granularity="per_tensor", weight_threshold=0
    ),
    "int4-per-channel": cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_channel", weight_threshold=0
    ),
    "int4-per-block16": cto.OpLinearQuantizerConfig(
        mode="linear_symmetric",
        dtype="int4",
        granularity="per_block",
        block_size=16,
        weight_threshold=0,
    ),
    "palette4-uniform-group8": cto.OpPalettizerConfig(
        mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=8, weight_threshold=0
    ),
    "palette6-uniform-per-tensor": cto.OpPalettizerConfig(
        mode="uniform", nbits=6, granularity="per_tensor", weight_threshold=0
    ),
}


@pytest.fixture(scope="module")
def dense(
    tiny_checkpoint_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recipe: Callable[..., Recipe],
) -> Path:
    """The tiny model's one shard with fp16 weights."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    target = tmp_path_factory.mktemp("dense") / "model.mlpackage"
    single = recipe(verify=None, prefill=None, shapes="range", layout={"kind": "single"})
    Lowering(Planner(checkpoint, single), checkpoint).lower("model", target)
    return target


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_constants(
    name: str, dense: Path, lower: Callable[..., Path], tmp_path: Path
) -> None:
    """They are what `encode` gives, and decode to what coremltools' optimizers make of the same
    program."""
    ours = convolution_weights(lower(compression={"default": name}))
    plain = [decoded(op) for op in convolution_weights(dense)]
    assert len(ours) == len(plain) == 2 * CONVOLUTIONS + 1

    for op, weight in zip(ours, plain, strict=True):
        encoded = parse_format(name).encode(weight)
        if isinstance(encoded, Affine):
            assert op.op_type == "constexpr_blockwise_shift_scale"
            np.testing.assert_array_equal(op.data.val.astype(np.int8), encoded.data)
            np.testing.assert_array_equal(op.scale.val, encoded.scale)
        else:
            assert isinstance(encoded, Palettized)
            assert op.op_type == "constexpr_lut_to_dense"
            np.testing.assert_array_equal(np.asarray(op.indices.val, np.uint8), encoded.indices)
            np.testing.assert_array_equal(op.lut.val, encoded.lut)
        np.testing.assert_array_equal(decoded(op), encoded.decode())

    config = cto.OptimizationConfig(op_type_configs={"conv": FORMATS[name]})
    optimize = cto.linear_quantize_weights if name.startswith("int") else cto.palettize_weights
    theirs = tmp_path / "theirs.mlpackage"
    optimize(ct.models.MLModel(str(dense), skip_model_load=True), config).save(str(theirs))
    for op, other in zip(ours, convolution_weights(theirs), strict=True):
        assert op.op_type == other.op_type
        np.testing.assert_array_equal(decoded(op), decoded(other))


def test_weights_are_the_checkpoints(dense: Path, tiny_checkpoint_folder: Path) -> None:
    """In the order of the layers, in fp16, as 1x1 convolutions."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    paths = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
             "mlp.gate", "mlp.up", "mlp.down")  # fmt: skip
    names = [f"model.layers.{i}.{path}_proj.weight" for i in range(2) for path in paths]
    stored = {checkpoint.read(name).numpy().astype(np.float16).tobytes() for name in
              [*names, "lm_head.weight"]}  # fmt: skip
    assert {decoded(op).tobytes() for op in convolution_weights(dense)} == stored


def test_formats_are_chosen_by_name(lower: Callable[..., Path]) -> None:
    chosen = {
        "default": "int8-per-channel",
        "types": {"head": "palette8-uniform-per-tensor"},
        "names": {"model.layers.0.*": "fp16", "model.layers.0.mlp.up*": "int8-per-tensor"},
    }
    ops = convolution_weights(lower(compression=chosen))
    kinds = Counter(op.op_type for op in ops)
    assert kinds == {
        "const": CONVOLUTIONS - 1,
        "constexpr_blockwise_shift_scale": CONVOLUTIONS + 1,
        "constexpr_lut_to_dense": 1,
    }
    assert ops[-1].op_type == "constexpr_lut_to_dense"
    scales = [op.scale.val.size for op in ops if op.op_type == "constexpr_blockwise_shift_scale"]
    assert scales.count(1) == 1
    assert isinstance(parse_format("fp16").encode(decoded(ops[0])), Dense)
