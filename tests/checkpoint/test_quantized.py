"""Checkpoints that came quantised: the right weights, or a refusal by name.

The truth is each format's own library where it can be installed, and else a plain loop over the
published layout, one element at a time.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.bitnet import pack_weights

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.checkpoint import StoredTensor
from cetane.checkpoint.quantized import dequantized
from cetane.errors import CetaneError

NAME = "model.layers.0.mlp.up_proj"
RANDOM = np.random.default_rng(0)
ROWS, COLUMNS = 24, 64


def folder(path: Path, said: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Path:
    plain = {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    save_file({k: v.contiguous() for k, v in (tensors | plain).items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **(said or {})}))
    return path


def check(path: Path, said: dict[str, Any], tensors: dict[str, torch.Tensor], truth: Any) -> None:
    checkpoint = open_checkpoint(folder(path, said, tensors))
    assert checkpoint.names() == [f"{NAME}.weight", "model.norm.weight"]
    assert checkpoint.shape(f"{NAME}.weight") == tuple(truth.shape)
    assert not set(said) & set(checkpoint.config)
    read = checkpoint.read(f"{NAME}.weight")
    torch.testing.assert_close(read, torch.as_tensor(truth).float(), rtol=1e-6, atol=1e-7)
    rows = checkpoint.read_rows(f"{NAME}.weight", 3, 9)
    assert torch.equal(rows, read[3:9])


def words_of(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words along the last axis, value by value."""
    per = 32 // bits
    order = order or tuple(range(per))
    words = np.zeros((values.shape[0], values.shape[1] // per), np.uint32)
    for row in range(values.shape[0]):
        for word in range(words.shape[1]):
            for place, which in enumerate(order):
                value = int(values[row, word * per + which])
                words[row, word] |= np.uint32(value << (bits * place))
    return words


def signed(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy())


@pytest.mark.parametrize(("linear", "power"), [("bitlinear", -1), ("autobitlinear", 1)])
def test_ternary(tmp_path: Path, linear: str, power: int) -> None:
    ternary = torch.from_numpy(RANDOM.integers(-1, 2, (ROWS, COLUMNS))).float()
    tensors = {
        f"{NAME}.weight": pack_weights(ternary.clone()),
        f"{NAME}.weight_scale": torch.tensor([1.75], dtype=torch.bfloat16),
    }
    said = {"quantization_config": {"quant_method": "bitnet", "linear_class": linear}}
    check(tmp_path, said, tensors, ternary * 1.75**power)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"use_rms_norm": True}, "adds norms"),
        ({"quantization_mode": "online"}, "only quantization_mode = 'offline'"),
        ({"linear_class": "another"}, "linear_class is none of"),
    ],
)
def test_other_ternary_layers(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    tensors = {f"{NAME}.weight": torch.zeros(ROWS, COLUMNS)}
    made = folder(tmp_path, {"quantization_config": {"quant_method": "bitnet", **said}}, tensors)
    with pytest.raises(CetaneError, match=why):
        open_checkpoint(made)


def test_fp8_blocks(tmp_path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.5
    truth = np.zeros((ROWS, COLUMNS), np.float32)
    for i in range(ROWS):
        for j in range(COLUMNS):
            truth[i, j] = float(weight[i, j].float()) * float(scale[i // 16, j // 28])
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 28]}}
    parts = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    check(tmp_path, said, parts, truth)


def test_blocks_larger_than_the_weight(tmp_path: Path) -> None:
    """Their scale is repeated as often as the weight has elements, whatever the config says."""
    weight, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.rand(1, 1)
    said = {"quant_method": "fp8", "weight_block_size": [2**40, 2**40]}
    parts = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale}
    check(tmp_path, {"quantization_config": said}, parts, weight.float() * scale)
    config = compressed("float-quantized", 8, "float", block_structure=[2**40, 2**40])
    parts = {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scale}
    check(tmp_path, config, parts, weight.float() * scale)


def compressed(form: str, bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", **more}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group},
        }
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_of_8_bits(tmp_path: Path, kind: str) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = library.QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
    weight = torch.randn(ROWS, COLUMNS)
    limit = 127 if kind == "int" else 448
    scale = weight.abs().amax(1, keepdim=True) / limit
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    stored = forward.quantize(weight, scale, torch.zeros_like(scale), args, dtype=dtype)
    truth = forward.dequantize(stored, scale, args=args)
    parts = {f"{NAME}.weight": stored, f"{NAME}.weight_scale": scale}
    check(tmp_path, compressed(f"{kind}-quantized", 8, kind), parts, truth)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors_of_4_bits(tmp_path: Path, asymmetric: bool) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.from_numpy(RANDOM.integers(-8, 8, (ROWS, COLUMNS), dtype=np.int8))
    scale = torch.rand(ROWS, COLUMNS // 16) + 0.1
    zero = torch.from_numpy(RANDOM.integers(-8, 8, (ROWS, COLUMNS // 16), dtype=np.int8))
    zero = zero if asymmetric else torch.zeros_like(zero)
    parts = {
        f"{NAME}.weight_packed": packing.pack_to_int32(values, 4),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if asymmetric:
        parts[f"{NAME}.weight_zero_point"] = packing.pack_to_int32(zero, 4, packed_dim=0)
    truth = np.zeros((ROWS, COLUMNS), np.float32)
    for i in range(ROWS):
        for j in range(COLUMNS):
            truth[i, j] = (int(values[i, j]) - int(zero[i, j // 16])) * float(scale[i, j // 16])
    said = compressed("pack-quantized", 4, strategy="group", group_size=16)
    check(tmp_path, said, parts, truth)


def test_awq(tmp_path: Path) -> None:
    values = RANDOM.integers(0, 16, (COLUMNS, ROWS))
    zeros = RANDOM.integers(0, 16, (4, ROWS))
    scales = RANDOM.random((4, ROWS)).astype(np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        f"{NAME}.qweight": signed(words_of(values, 4, order)),
        f"{NAME}.qzeros": signed(words_of(zeros, 4, order)),
        f"{NAME}.scales": torch.from_numpy(scales),
    }
    truth = np.zeros((ROWS, COLUMNS), np.float32)
    for i in range(ROWS):
        for j in range(COLUMNS):
            truth[i, j] = (values[j, i] - zeros[j // 16, i]) * np.float32(scales[j // 16, i])
    said = {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}}
    check(tmp_path, said, parts, truth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    "keys", [("checkpoint_format",), ("format",), ("format", "checkpoint_format")]
)
def test_gptq(tmp_path: Path, bits: int, version: str, keys: tuple[str, ...]) -> None:
    top = 1 << bits
    values = RANDOM.integers(0, top, (COLUMNS, ROWS))
    zeros = RANDOM.integers(1, top, (4, ROWS))
    scales = RANDOM.random((4, ROWS)).astype(np.float16)
    order = RANDOM.permutation(COLUMNS) // 16  # as `desc_act` leaves it
    stored = zeros - (version == "gptq")
    parts = {
        f"{NAME}.qweight": signed(words_of(values.T, bits)).T,
        f"{NAME}.qzeros": signed(words_of(stored, bits)),
        f"{NAME}.scales": torch.from_numpy(scales),
        f"{NAME}.g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    truth = np.zeros((ROWS, COLUMNS), np.float32)
    for i in range(ROWS):
        for j in range(COLUMNS):
            group = order[j]
            truth[i, j] = (values[j, i] - zeros[group, i]) * np.float32(scales[group, i])
    spared = {"-:.*lm_head": {}, "+:.*up_proj": {"desc_act": True, "bits": bits}}
    said = {"quant_method": "gptq", "bits": bits, "dynamic": spared} | dict.fromkeys(keys, version)
    check(tmp_path, {"quantization_config": said}, parts, truth)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    values = RANDOM.integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
    largest = RANDOM.random(ROWS).astype(np.float32)
    parts = {
        f"{NAME}.weight": torch.from_numpy(values),
        f"{NAME}.SCB": torch.from_numpy(largest),
        f"{NAME}.weight_format": torch.zeros((), dtype=torch.uint8),
    }
    truth = values.astype(np.float32) * largest[:, None] / 127
    check(tmp_path, {"quantization_config": {"quant_method": "bitsandbytes"}}, parts, truth)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("larger", [False, True])
def test_bitsandbytes_nf4(tmp_path: Path, nested: bool, larger: bool) -> None:
    """`larger`: the blocks that the file says are larger than the weight."""
    count = ROWS * COLUMNS
    block, said_block = (count, 2**40) if larger else (64, 64)
    nested_block = 2**40 if larger else 16
    indices = RANDOM.integers(0, 16, count)
    code = np.sort(RANDOM.random(16)).astype(np.float32)
    largest = RANDOM.random(count // block).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": said_block, "shape": [ROWS, COLUMNS]}
    bytes_ = (indices[0::2] << 4 | indices[1::2]).astype(np.uint8).reshape(-1, 1)
    prefix = f"{NAME}.weight"
    parts = {prefix: torch.from_numpy(bytes_), f"{prefix}.quant_map": torch.from_numpy(code)}
    if nested:
        outer_code = np.sort(RANDOM.random(256)).astype(np.float32)
        inner = RANDOM.integers(0, 256, count // block).astype(np.uint8)
        outer = RANDOM.random(-(-len(inner) // nested_block)).astype(np.float32)
        state |= {"nested_blocksize": nested_block, "nested_offset": 0.25}
        largest = np.array(
            [outer_code[v] * outer[i // nested_block] + 0.25 for i, v in enumerate(inner)]
        )
        parts[f"{prefix}.absmax"] = torch.from_numpy(inner)
        parts[f"{prefix}.nested_absmax"] = torch.from_numpy(outer)
        parts[f"{prefix}.nested_quant_map"] = torch.from_numpy(outer_code)
    else:
        parts[f"{prefix}.absmax"] = torch.from_numpy(largest)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    parts[f"{prefix}.quant_state.bitsandbytes__nf4"] = torch.from_numpy(text)
    truth = np.array([code[v] * largest[i // block] for i, v in enumerate(indices)], np.float32)
    said = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    check(tmp_path, said, parts, truth.reshape(ROWS, COLUMNS))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx(tmp_path: Path, bits: int) -> None:
    values = RANDOM.integers(0, 1 << bits, (ROWS, COLUMNS))
    scales, biases = (RANDOM.random((ROWS, 2)).astype(np.float16) for _ in range(2))
    parts = {
        f"{NAME}.weight": torch.from_numpy(words_of(values, bits)),
        f"{NAME}.scales": torch.from_numpy(scales),
        f"{NAME}.biases": torch.from_numpy(biases),
    }
    truth = np.zeros((ROWS, COLUMNS), np.float32)
    for i in range(ROWS):
        for j in range(COLUMNS):
            truth[i, j] = values[i, j] * np.float32(scales[i, j // 32]) + biases[i, j // 32]
    said = {"quantization": {"group_size": 32, "bits": bits}}
    check(tmp_path, said | {"quantization_config": said["quantization"]}, parts, truth)


FLOAT, BYTES, WORDS = torch.ones(8, 8), torch.ones(8, 8).to(torch.uint8), torch.ones(8, 1).int()
LEFT = {
    "scale": {f"{NAME}.weight": FLOAT, f"{NAME}.weight_scale": torch.ones(8, 1)},
    "scale_inv": {f"{NAME}.weight": FLOAT, f"{NAME}.weight_scale_inv": torch.ones(1, 1)},
    "qweight": {f"{NAME}.qweight": WORDS},
    "scales": {f"{NAME}.weight": FLOAT, f"{NAME}.scales": torch.ones(8, 1)},
    "blocks": {f"{NAME}_blocks": BYTES, f"{NAME}_scales": BYTES + 1},
    "integers": {f"{NAME}.weight": BYTES},
    "fp8": {f"{NAME}.weight": FLOAT.to(torch.float8_e4m3fn)},
    "bool": {f"{NAME}.weight": FLOAT.bool()},
}


@pytest.mark.parametrize("tensors", LEFT.values(), ids=LEFT)
def test_companions_that_the_config_does_not_mention(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(CetaneError, match="weights are quantised") as refusal:
        open_checkpoint(folder(tmp_path, None, tensors))
    assert "dequantize()" in (refusal.value.hint or "")


def test_many_names_of_companions_are_soon_read(tmp_path: Path) -> None:
    """A header may hold many thousands of them. Twice as many took four times as long."""
    empty = StoredTensor(tmp_path / "model.safetensors", 0, 0, (0,), "F32")
    tensors = {f"{number}_scale": empty for number in range(20_000)}
    begun = time.process_time()
    assert dequantized(tensors, {}, tmp_path / "config.json") == (tensors, {}, None)
    assert time.process_time() - begun < 1


GPTQ: dict[str, torch.Tensor] = {
    "qweight": torch.ones(2, 8).int(), "scales": torch.ones(2, 8), "qzeros": torch.ones(2, 1).int(),
}  # fmt: skip
INT8: dict[str, torch.Tensor] = {
    "weight": torch.ones(4, 4, dtype=torch.int8), "weight_scale": torch.ones(4, 2),
}  # fmt: skip
GPTQ_SAID = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
INT8_SAID = compressed("int-quantized", 8, strategy="group", group_size=2)
PARTS = [
    (GPTQ_SAID, GPTQ, "qweight", torch.ones(2, 8)),
    (GPTQ_SAID, GPTQ, "qweight", torch.ones(2, 8).bfloat16()),
    (GPTQ_SAID, GPTQ, "qweight", torch.ones(2, 8, dtype=torch.int8)),
    (GPTQ_SAID, GPTQ, "scales", torch.ones(2, 8).int()),
    (GPTQ_SAID, GPTQ, "qzeros", torch.ones(2, 1)),
    (GPTQ_SAID, GPTQ, "g_idx", -torch.ones(16).int()),
    (GPTQ_SAID, GPTQ, "g_idx", torch.ones(16).int() * 2),
    (GPTQ_SAID, GPTQ, "g_idx", torch.full((16,), 0.7)),
    (INT8_SAID, INT8, "weight_scale", torch.ones(4, 2).int()),
    (INT8_SAID, INT8, "weight_g_idx", -torch.ones(4).int()),
    (INT8_SAID, INT8, "weight_g_idx", torch.ones(1).int()),
    (INT8_SAID, INT8, "weight_g_idx", torch.tensor(1)),
    (INT8_SAID, INT8, "weight_zero_point", torch.ones(4, 0).to(torch.int8)),
    (INT8_SAID, INT8, "weight_zero_point", torch.ones(4, 1).to(torch.int8)),
]


@pytest.mark.parametrize(("said", "whole", "name", "part"), PARTS)
def test_a_part_that_does_not_fit(
    tmp_path: Path, said: Any, whole: dict[str, torch.Tensor], name: str, part: torch.Tensor
) -> None:
    """Of another dtype or shape, or a group that is not there; with the right parts it is read."""
    for parts in (whole, whole | {name: part}):
        stored = {f"{NAME}.{key}": value for key, value in parts.items()}
        path = folder(tmp_path, said, stored)
        if parts is whole:
            open_checkpoint(path).read(f"{NAME}.weight")
        else:
            with pytest.raises(CetaneError, match="does not fit"):
                open_checkpoint(path).read(f"{NAME}.weight")


AWQ: dict[str, torch.Tensor] = {
    "qweight": torch.ones(16, 1).int(), "scales": torch.ones(2, 8),
    "qzeros": torch.ones(2, 1).int(),
}  # fmt: skip
MLX: dict[str, torch.Tensor] = {
    "weight": torch.ones(8, 2).int(), "scales": torch.ones(8, 2), "biases": torch.ones(8, 2),
}  # fmt: skip
GROUPED = {
    "awq": (lambda size: {"quant_method": "awq", "bits": 4, "group_size": size}, AWQ, (8,)),
    "gptq": (lambda size: {"quant_method": "gptq", "bits": 4, "group_size": size}, GPTQ, (8,)),
    "gptq, a size of some modules": (
        lambda size: {
            "quant_method": "gptq", "bits": 4, "group_size": 32,
            "dynamic": {"a": {"group_size": size}},
        }, GPTQ, (8,),
    ),
    "mlx": (lambda size: {"bits": 4, "group_size": size}, MLX, (8,)),
    "compressed-tensors": (
        lambda size: compressed("int-quantized", 8, group_size=size)["quantization_config"],
        INT8, (2,),
    ),
    "gptq, one group": (
        lambda size: {"quant_method": "gptq", "bits": 4, "group_size": size},
        GPTQ | {"scales": torch.ones(1, 8), "qzeros": torch.ones(1, 1).int()}, (-1, 16, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "parts", "right"), GROUPED.values(), ids=GROUPED)
def test_groups_of_another_size_than_the_config_says(
    tmp_path: Path, said: Any, parts: dict[str, torch.Tensor], right: tuple[int, ...]
) -> None:
    """Scales of half the groups would give wrong weights, which no gate could see."""
    stored = {f"{NAME}.{key}": value for key, value in parts.items()}
    for size in right:
        open_checkpoint(folder(tmp_path, {"quantization_config": said(size)}, stored))
    for size in (0, 4, -2, "8", [8]):
        if size not in right:
            path = folder(tmp_path, {"quantization_config": said(size)}, stored)
            with pytest.raises(CetaneError, match="group_size is"):
                open_checkpoint(path)


@pytest.mark.parametrize("offset", [10**39, float("nan"), float("-inf"), True, "0"])
def test_offsets_that_are_no_number_of_fp32(tmp_path: Path, offset: Any) -> None:
    state = {"blocksize": 64, "shape": [8, 8], "nested_blocksize": 256, "nested_offset": offset}
    prefix = f"{NAME}.weight"
    parts = {
        prefix: torch.ones(32, 1, dtype=torch.uint8),
        f"{prefix}.quant_map": torch.ones(16),
        f"{prefix}.absmax": torch.ones(1, dtype=torch.uint8),
        f"{prefix}.nested_absmax": torch.ones(1),
        f"{prefix}.nested_quant_map": torch.ones(256),
        f"{prefix}.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()]).to(
            torch.uint8
        ),
    }
    path = folder(tmp_path, {"quantization_config": {"quant_method": "bitsandbytes"}}, parts)
    with pytest.raises(CetaneError, match=r"quant_state.* does not fit the format"):
        open_checkpoint(path)


def test_a_damaged_weight_is_named(tmp_path: Path) -> None:
    stored = {f"{NAME}.{key}": value for key, value in GPTQ.items()}
    path = folder(tmp_path, GPTQ_SAID, stored | {f"{NAME}.g_idx": torch.full((16,), 10**6)})
    with pytest.raises(CetaneError, match=f"{NAME}.weight, int4") as refusal:
        open_checkpoint(path).read(f"{NAME}.weight")
    assert refusal.value.hint == "the checkpoint is damaged: download it again"


METHODS = ("nvfp4", "hqq", "quanto", "torchao", "aqlm", "modelopt", "fbgemm_fp8", "no such thing")


@pytest.mark.parametrize("method", METHODS)
def test_methods_without_a_rule_are_refused_by_name(tmp_path: Path, method: str) -> None:
    said = {"quantization_config": {"quant_method": method}}
    with pytest.raises(CetaneError, match=method.replace("_", "-")):
        open_checkpoint(folder(tmp_path, said, {f"{NAME}.weight": FLOAT}))


STATE = torch.tensor([*b'{"blocksize": 64, "shape": [8, 8]}'], dtype=torch.uint8)
WRONG = {
    "awq, gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, {}),
    "awq, gemv in transformers' words": ({"quant_method": "awq", "bits": 4, "format": "gemv"}, {}),
    "awq, two layouts": (
        {"quant_method": "awq", "bits": 4, "format": "gemm", "version": "gemv"}, {},
    ),
    "gptq, two layouts": (
        {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"}, {},
    ),
    "gptq, 3 bits": ({"quant_method": "gptq", "bits": 3}, {}),
    "gptq, other bits for a module": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*down_proj": {"bits": 8}}}, {},
    ),
    "gptq, settings of modules that are no object": (
        {"quant_method": "gptq", "bits": 4, "dynamic": ["down_proj"]}, {},
    ),
    "gptq, no scales": ({"quant_method": "gptq", "bits": 4}, {f"{NAME}.qweight": WORDS}),
    "compressed-tensors, nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, {},
    ),
    "compressed-tensors, weights for rotated inputs": (
        compressed("int-quantized", 8)["quantization_config"]
        | {"transform_config": {"config_groups": {"v": {"type": "hadamard", "apply": []}}}},
        {f"{NAME}.weight": INT8["weight"], f"{NAME}.weight_scale": INT8["weight_scale"]},
    ),
    "fp8, scales of another shape": (
        {"quant_method": "fp8"},
        {f"{NAME}.weight": FLOAT.to(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": FLOAT},
    ),
    "mlx, 3 bits": (
        {"group_size": 32, "bits": 3}, {f"{NAME}.weight": WORDS, f"{NAME}.scales": FLOAT},
    ),
    "mlx, bits that are no whole number": (
        {"group_size": 32, "bits": 4.0}, {f"{NAME}.weight": WORDS, f"{NAME}.scales": FLOAT},
    ),
    "bitsandbytes, a state without a weight": (
        {"quant_method": "bitsandbytes"},
        {f"{NAME}.weight.quant_state.bitsandbytes__nf4": STATE},
    ),
    "not an object": ("fp8", {}),
}  # fmt: skip


@pytest.mark.parametrize(("said", "tensors"), WRONG.values(), ids=WRONG)
def test_layouts_that_a_rule_does_not_fit(
    tmp_path: Path, said: Any, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(CetaneError, match=r"(quantised|not an object)"):
        open_checkpoint(folder(tmp_path, {"quantization_config": said}, tensors))


def test_mxfp4(tmp_path: Path) -> None:
    """By hand, and as transformers reads gpt-oss: experts, transposed, some of them alone."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, outputs, groups = 3, 6, 2
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, outputs, groups, 16), generator=generator)
    scales = torch.randint(100, 140, (experts, outputs, groups), generator=generator)
    truth = np.zeros((experts, 32 * groups, outputs), np.float32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for e, row, group, byte in np.ndindex(*blocks.shape):
        packed, power = int(blocks[e, row, group, byte]), int(scales[e, row, group]) - 127
        for half, nibble in enumerate((packed & 15, packed >> 4)):
            sign = -1.0 if nibble & 8 else 1.0
            value = sign * magnitudes[nibble & 7] * 2.0**power
            truth[e, 32 * group + 2 * byte + half, row] = value
    parts = {"blocks": blocks.to(torch.uint8), "scales": scales.to(torch.uint8)}
    theirs = convert_moe_packed_tensors(**parts, dtype=torch.float32)
    assert np.array_equal(theirs.numpy(), truth)

    name = "model.layers.0.mlp.experts.down_proj"
    stored = {f"{name}_{part}": tensor for part, tensor in parts.items()}
    stored[f"{name}_bias"] = torch.ones(experts, outputs)
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    checkpoint = open_checkpoint(folder(tmp_path, config, stored))
    assert checkpoint.names() == [name, f"{name}_bias", "model.norm.weight"]
    assert checkpoint.shape(name) == truth.shape
    assert np.array_equal(checkpoint.read(name).numpy(), truth)
    assert np.array_equal(checkpoint.read_rows(name, 1, 3).numpy(), truth[1:3])


def test_a_weight_that_is_plain_too(tmp_path: Path) -> None:
    """Its parts were taken, and nothing said that the other tensor went unread."""
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {
        f"{name}_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8),
        f"{name}_scales": torch.zeros(2, 4, 1, dtype=torch.uint8),
        name: torch.ones(2, 32, 4),
    }
    path = folder(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}}, stored)
    with pytest.raises(CetaneError, match=f"{name} is there twice, plain and in parts"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("scales", torch.zeros(2, 4, 3, dtype=torch.uint8)),
        ("scales", torch.zeros(2, 4, 1)),
        ("blocks", torch.zeros(2, 4, 1, 8, dtype=torch.uint8)),
        ("blocks", torch.zeros(2, 4, 16, dtype=torch.uint8)),
        ("blocks", torch.zeros(2, 4, 1, 16)),
    ],
)
def test_mxfp4_that_does_not_fit(part: str, value: torch.Tensor, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {
        f"{name}_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8),
        f"{name}_scales": torch.zeros(2, 4, 1, dtype=torch.uint8),
        f"{name}_{part}": value,
    }
    path = folder(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}}, stored)
    with pytest.raises(CetaneError, match="does not fit the format"):
        open_checkpoint(path)
