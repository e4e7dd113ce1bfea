"""Stamped packages are, byte by byte, what converting the shard with its own weights makes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cetane.checkpoint import Checkpoint
from cetane.compress import parse_format
from cetane.errors import CetaneError
from cetane.families import Block
from cetane.lower.convert import convert_shard
from cetane.lower.lower import Lowering, files
from cetane.lower.package import WEIGHTS
from cetane.lower.template import Template, shard_weights
from cetane.mil import load
from cetane.mil.package import Package
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

PER_BLOCK = {"layout": {"kind": "per-block"}, "prefill": None}
ZAYA = {
    "num_hidden_layers": 4,
    "num_experts": 2,
    "moe_intermediate_size": 32,
    "router_hidden_size": 16,
    "pad_token_id": 0,
}


def all_bytes(package: Path) -> dict[Path, bytes]:
    return {path: (package / path).read_bytes() for path in files(package)}


@pytest.fixture
def lowering(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any], recipe: Callable[..., Recipe]
) -> Callable[..., Lowering]:
    """`lowering(model_type, config, **recipe options)`."""

    def make(
        model_type: str = "llama", config: dict[str, Any] | None = None, **options: Any
    ) -> Lowering:
        checkpoint = in_memory(tiny_model(model_type, **(config or {})))
        return Lowering(Planner(checkpoint, recipe(**options)), checkpoint)

    return make


def assert_stamps(lowering: Lowering, folder: Path, shards: tuple[str, ...]) -> None:
    """The last of the shards was stamped from the template of the first, and is right."""
    assert len({lowering.structure(shard) for shard in shards}) == 1
    for shard in shards:
        lowering.lower(shard, folder / f"{shard}.mlpackage")
    lowering.verify(shards[-1], folder / f"{shards[-1]}.mlpackage")
    assert sorted(path.name for path in folder.iterdir()) == [f"{s}.mlpackage" for s in shards]


FORMATS = (
    {
        "q_proj": "fp16",
        "k_proj": "int8-per-channel",
        "v_proj": "int8-per-tensor",
        "o_proj": "int8-per-block16",
        "gate_proj": "int4-per-channel",
        "up_proj": "int4-per-tensor",
        "down_proj": "int4-per-block32",
    },
    {
        "q_proj": "palette1-uniform-per-tensor",
        "k_proj": "palette2-kmeans-group8",
        "v_proj": "palette3-uniform-per-tensor",
        "o_proj": "palette4-uniform-group8",
        "gate_proj": "palette6-kmeans-per-tensor",
        "up_proj": "palette8-uniform-group16",
    },
)


@pytest.mark.parametrize("formats", FORMATS, ids=["linear", "palettes"])
def test_formats(
    formats: dict[str, str], lowering: Callable[..., Lowering], tmp_path: Path
) -> None:
    """int8-per-tensor's scale and small palettes are values of the specification."""
    names = {f"*.{name}.weight": form for name, form in formats.items()}
    made = lowering(**PER_BLOCK | {"verify": None}, compression={"names": names})
    used = {item.format for item in shard_weights(made.planner, "layer-01").values()}
    assert {parse_format(form) for form in formats.values()} <= used
    assert_stamps(made, tmp_path, ("layer-00", "layer-01"))


@pytest.mark.parametrize(
    ("contract", "shapes"),
    [("readonly", "static"), ("blend", "range"), ("shift", "static"), ("stateful", "range")],
)
def test_contracts(
    contract: str, shapes: str, lowering: Callable[..., Lowering], tmp_path: Path
) -> None:
    layout = {"kind": "chunks", "chunks": 2}
    made = lowering("qwen2", contract=contract, shapes=shapes, prefill=None, layout=layout,
                    compression={"default": "palette4-uniform-group8"})  # fmt: skip
    assert_stamps(made, tmp_path, ("chunk-00", "chunk-01"))


def test_weights_that_are_all_in_the_specification(
    lowering: Callable[..., Lowering], tmp_path: Path
) -> None:
    """coremltools stores no tensor of fewer than 10 values in a file."""
    smallest = {"hidden_size": 2, "intermediate_size": 1, "num_attention_heads": 1,
                "num_key_value_heads": 1, "head_dim": 2}  # fmt: skip
    assert_stamps(lowering("llama", smallest, **PER_BLOCK), tmp_path, ("layer-00", "layer-01"))
    assert (tmp_path / "layer-00.mlpackage" / WEIGHTS).read_bytes() == b""


def test_slices_of_the_head(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    made = lowering(**PER_BLOCK, head={"slices": 2}, compression={"default": "int8-per-channel"})
    assert_stamps(made, tmp_path, ("head-1",))
    assert made.structure("head-0") != made.structure("head-1")  # their outputs' names differ


def test_experts(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    layout = {"kind": "per-block", "routed": ["decode"]}
    made = lowering("zaya", ZAYA, verify=None, prefill=4, layout=layout,
                    compression={"default": "palette4-uniform-per-tensor"})  # fmt: skip
    assert_stamps(made, tmp_path, ("attn-00", "attn-01"))
    experts = tmp_path / "experts"
    experts.mkdir()
    assert_stamps(made, experts, ("moe-01", "moe-02"))
    program = load(experts / "moe-02.mlpackage")
    assert sorted(program.functions) == [
        "decode", "expert-00-decode", "expert-01-decode", "expert-02-decode", "prefill",
    ]  # fmt: skip


def test_equal_weights_stay_apart(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    """Biases of zeros and gains of ones are neither merged nor folded, whoever converts them."""
    made = lowering("qwen2", **PER_BLOCK)
    tensors = made.weights.tensors  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1."):
            if name.endswith("bias"):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1)
            elif "k_proj" in name:
                tensor.copy_(tensors[name.replace("k_proj", "v_proj")])
    assert_stamps(made, tmp_path, ("layer-00", "layer-01"))
    sizes = {(tmp_path / f"layer-0{i}.mlpackage" / WEIGHTS).stat().st_size for i in range(2)}
    assert len(sizes) == 1


def test_the_constants_are_the_weights(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    """Read back, without what wrote them."""
    made = lowering(**PER_BLOCK, compression={"default": "palette4-uniform-group8"})
    for shard in ("layer-00", "layer-01"):
        made.lower(shard, tmp_path / shard)
        used = shard_weights(made.planner, shard)
        wanted = [made.encode(item.weight).decode() for item in used.values()]
        for function in load(tmp_path / shard).functions.values():
            ops = {op.name: op for op in function.ops}
            for label, value in zip(used, wanted, strict=True):
                op = ops[label.replace(".", "_")]
                if op.kind == "const":
                    np.testing.assert_array_equal(op.inputs["val"][0].numpy(), value)
                else:
                    indices, lut = (op.inputs[part][0].numpy() for part in ("indices", "lut"))
                    groups = lut.shape[0]
                    found = np.take_along_axis(
                        lut.reshape(groups, -1), indices.reshape(groups, -1).astype(int), 1
                    )
                    np.testing.assert_array_equal(found.reshape(value.shape), value)


SCRIPT = """
import sys
from pathlib import Path
from cetane.checkpoint import open_checkpoint
from cetane.lower.lower import Lowering
from cetane.planner import Planner
from cetane.schema.recipe import Recipe
checkpoint = open_checkpoint(sys.argv[1])
recipe = Recipe.model_validate_json(sys.argv[2])
lowering = Lowering(Planner(checkpoint, recipe), checkpoint)
lowering.lower("layer-01", Path(sys.argv[3]))
print(lowering.structure("layer-01"))
"""


@pytest.mark.usefixtures("own_cache")
def test_another_process_writes_the_same(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """It has other hashes of strings, and no template of ours."""
    wanted = recipe(**PER_BLOCK, compression={"default": "int8-per-tensor"})
    lowering = Lowering(Planner(tiny_checkpoint, wanted), tiny_checkpoint)
    lowering.lower("layer-01", tmp_path / "ours.mlpackage")
    other = {"PYTHONHASHSEED": "1", "CETANE_CACHE": str(tmp_path / "other cache")}
    structure = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny_checkpoint.source, wanted.model_dump_json(),
         tmp_path / "theirs.mlpackage"],
        env=os.environ | other, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert structure.strip() == lowering.structure("layer-01")
    assert all_bytes(tmp_path / "ours.mlpackage") == all_bytes(tmp_path / "theirs.mlpackage")


def test_metadata_is_one_packages_own(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    made = lowering(layout={"kind": "single"})
    made.lower("model", tmp_path / "first.mlpackage", {"only": "first"})
    made.lower("model", tmp_path / "second.mlpackage")
    first, second = (
        Package(tmp_path / f"{name}.mlpackage").spec.description.metadata.userDefined
        for name in ("first", "second")
    )
    assert first["only"] == "first" and "only" not in second
    assert second.keys() >= first.keys() - {"only"}


def test_a_package_that_was_changed(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    made = lowering(**PER_BLOCK)
    package = tmp_path / "layer.mlpackage"
    made.lower("layer-00", package)
    with pytest.raises(CetaneError, match="differs from a new conversion of layer-01"):
        made.verify("layer-01", package)


def test_a_weight_that_is_damaged(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    made = lowering(**PER_BLOCK)
    name = "model.layers.1.mlp.up_proj.weight"
    made.lower("layer-00", tmp_path / "first")
    made.weights.tensors[name][0, 0] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(CetaneError, match=f"{name} holds NaN"):
        made.lower("layer-01", tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_weight_that_no_function_uses(
    lowering: Callable[..., Lowering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lowering(**PER_BLOCK)
    block = made.planner.members["layer-00"][0]
    forward = type(block).forward

    def without_norm(self: Any, flow: Any, memory: Any) -> None:
        self.input_layernorm.forward = lambda x: x
        forward(self, flow, memory)

    monkeypatch.setattr(type(block), "forward", without_norm)
    with pytest.raises(CetaneError, match=r"lost the weight blocks\.0\.input_layernorm\.weight"):
        made.lower("layer-00", tmp_path / "layer")


def test_a_constant_of_another_size(lowering: Callable[..., Lowering], tmp_path: Path) -> None:
    made = lowering(**PER_BLOCK)
    template = Template.converted(made.planner, "layer-00", tmp_path / "template.mlpackage")
    label = "blocks.0.input_layernorm.weight"
    other = made.constants("layer-00")("blocks.0.mlp.up_proj.weight")
    with pytest.raises(CetaneError, match=rf"{label} has \d+ bytes, not 128"):
        template.stamp(lambda _: other, tmp_path / "stamped")


def test_placeholders_that_were_changed(
    lowering: Callable[..., Lowering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lowering(**PER_BLOCK)

    def changed(planner: Any, shard: str, constant: Any, target: Path, *_: Any) -> Any:
        return convert_shard(planner, shard, made.constants(shard), target)

    monkeypatch.setattr("cetane.lower.template.convert_shard", changed)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))  # it may have the template
    with pytest.raises(CetaneError, match=r"lowering changed the weight blocks\.0"):
        made.lower("layer-00", tmp_path / "layer")


def parameters(blocks: tuple[Block, ...]) -> list[torch.nn.Parameter]:
    return [parameter for block in blocks for parameter in block.parameters()]


def test_parameters_are_left_alone(
    lowering: Callable[..., Lowering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on the meta device and those that are loaded, after a failure too."""
    made = lowering(**PER_BLOCK)
    blocks = made.planner.members["layer-00"] + made.planner.members["layer-01"]
    blocks[1].load(made.weights)
    before = parameters(blocks)
    values = [p.clone() for p in parameters(blocks[1:])]
    made.lower("layer-00", tmp_path / "first")
    made.lower("layer-01", tmp_path / "second")
    made.verify("layer-01", tmp_path / "second")

    def fails(*_: Any) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr(type(blocks[0].mlp), "forward", fails)
    with pytest.raises(RuntimeError, match="inside"):
        Lowering(made.planner, made.weights).lower("layer-00", tmp_path / "third")
    with pytest.raises(RuntimeError, match="inside"):
        convert_shard(made.planner, "layer-01", made.constants("layer-01"), tmp_path / "fourth")
    after = parameters(blocks)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(torch.equal(p, v) for p, v in zip(parameters(blocks[1:]), values, strict=True))
