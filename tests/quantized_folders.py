"""Checkpoint folders with projections of 8 bits, and the model that their integers stand for."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tests.conftest import build_tokenizer

BLOCK = 32


def compressed(kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


SAID: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "compressed int8": compressed("int"),
    "compressed float8": compressed("float"),
}
"""What a config says of its quantisation."""


@torch.no_grad()
def save_quantized(kind: str, model: transformers.PreTrainedModel, folder: Path) -> None:
    """Write the model with quantised projections, one of `SAID`, and a tokenizer. The model gets
    the weights that the integers stand for."""
    tensors = dict(model.state_dict())
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            parts, rounded = quantized(kind, weight)
            weight.copy_(rounded)
            tensors |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    build_tokenizer().save_pretrained(folder)
    config = model.config.to_dict() | {"quantization_config": SAID[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantized(kind: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix's stored parts, by their endings, and the matrix that they stand for."""
    rows, columns = weight.shape
    if kind == "fp8":
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        stored = (blocks / scale).to(torch.float8_e4m3fn)
        rounded = (stored.float() * scale).reshape(rows, columns)
        parts = {".weight_scale_inv": scale[:, 0, :, 0].clone()}
        return {".weight": stored.reshape(rows, columns), **parts}, rounded
    largest = weight.abs().amax(1, keepdim=True)
    if kind == "compressed float8":
        stored, scale = (weight / largest * 448).to(torch.float8_e4m3fn), largest / 448
    else:
        stored, scale = (weight / largest * 127).round().to(torch.int8), largest / 127
    companion = (
        {".SCB": largest[:, 0].clone()} if kind == "bitsandbytes" else {".weight_scale": scale}
    )
    return {".weight": stored, **companion}, stored.float() * scale
