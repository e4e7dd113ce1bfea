"""Experts on disk: one by one as the hub has them, or in the two tensors of transformers 5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import build_model
from tests.families.matrix_models import GRANITE_HYBRIDS, NEMOTRONS
from tests.families.mixture_models import DEEPSEEK_EXPERTS, LFM2_EXPERTS

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError

KINDS: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": 3},
    "mixtral": {"num_local_experts": 3},
    "ernie4_5_moe": {"moe_num_experts": 3, "tie_word_embeddings": False},
    "hunyuan_v1_moe": {"num_experts": 3},
    "granitemoehybrid": GRANITE_HYBRIDS["mixture"],
    "granitemoeshared": {"num_local_experts": 3, "shared_intermediate_size": 24},
    "glm4_moe": DEEPSEEK_EXPERTS,
    "dots1": DEEPSEEK_EXPERTS,
    "exaone_moe": {"num_experts": 3, "moe_intermediate_size": 20},
    "nemotron_h": NEMOTRONS["mixture"],
    "flex_olmo": {"num_experts": 3},
    "afmoe": {"num_experts": 3, "moe_intermediate_size": 20, "num_dense_layers": 1},
    "mellum": {"num_experts": 3, "moe_intermediate_size": 20},
    "solar_open": DEEPSEEK_EXPERTS,
    "qwen2_moe": {"num_experts": 5, "moe_intermediate_size": 20},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 20},
    "lfm2_moe": LFM2_EXPERTS
    | {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": False},
}


def saved(kind: str, folder: Path, fused: bool) -> Any:
    """A tiny model, and its folder with the experts one by one or together."""
    model = build_model(kind, **KINDS[kind])
    model.save_pretrained(folder)
    if fused:
        save_file(model.state_dict(), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_are_read(kind: str, fused: bool, tmp_path: Path) -> None:
    model = saved(kind, tmp_path, fused)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert fused == any(name.endswith("experts.down_proj") for name in on_disk)
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert checkpoint.names() == sorted(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor)
        if tensor.ndim == 3:
            assert torch.equal(checkpoint.read_rows(name, 1, 3), tensor[1:3])


def test_gates_of_heads_are_renamed(tmp_path: Path) -> None:
    """LFM3's have another name on disk than in transformers."""
    model = build_model("lfm3", layer_types=["conv", "full_attention"])
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.self_attn.gate_proj.weight" in stored
    gates = "model.layers.1.self_attn.g_proj.weight"
    assert torch.equal(open_checkpoint(tmp_path).read(gates), model.state_dict()[gates])


def damaged(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.2.up_proj.weight"), "not all there"),
        (lambda t: t.pop("model.layers.1.mlp.experts.0.gate_proj.weight"), "not all there"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(3, 4)}),
            "different shapes",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.1.down_proj.weight": torch.ones(3)}),
            "different shapes",
        ),
    ],
)
def test_experts_that_are_missing_or_differ(change: Any, message: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, fused=False)
    damaged(tmp_path, change)
    with pytest.raises(CetaneError, match=message):
        open_checkpoint(tmp_path)


def test_gates_of_another_shape(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, fused=False)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for number in range(5):
            tensors[f"model.layers.0.mlp.experts.{number}.gate_proj.weight"] = torch.ones(3, 64)

    damaged(tmp_path, change)
    with pytest.raises(CetaneError, match="beside them"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Joined by their bytes, one of the two would be read as what it is not."""
    saved("qwen3_moe", tmp_path, fused=False)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(dtype if "gate_proj" in name else torch.float32)

    damaged(tmp_path, change)
    with pytest.raises(CetaneError, match="F32 beside them"):
        open_checkpoint(tmp_path)


def test_what_a_nemotron_h_says_of_its_head(tmp_path: Path) -> None:
    """transformers ties none, so the config must not hide the head that is stored."""
    model = build_model("nemotron_h", **NEMOTRONS["dense"], tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is False
    head = checkpoint.read("lm_head.weight")
    assert torch.equal(head, model.lm_head.weight)
    assert not torch.equal(head, model.model.embeddings.weight)
