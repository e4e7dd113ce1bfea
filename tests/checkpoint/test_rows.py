"""Rows of a tensor, in every form that holds them in one piece."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError


def check(checkpoint: Checkpoint, name: str) -> None:
    whole = checkpoint.read(name)
    rows = len(whole)
    for start, stop in ((0, rows), (0, 1), (1, rows - 1), (rows - 1, rows), (1, 1), (rows, rows)):
        part = checkpoint.read_rows(name, start, stop)
        assert torch.equal(part, whole[start:stop]) and part.shape == whole[start:stop].shape
        assert part.untyped_storage().nbytes() == part.nbytes  # the rest is not kept alive
    for start, stop in ((0, rows + 1), (-1, 1), (2, 1), (rows + 1, rows + 1)):
        with pytest.raises(CetaneError, match=f"'{name}' of shape .* no rows {start} to {stop}"):
            checkpoint.read_rows(name, start, stop)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {
        "a": torch.randn(5, 3, 2).bfloat16(),
        "b": torch.arange(7),
        "c": torch.zeros(4, 0),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.0),
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_safetensors(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in ("a", "b", "c"):
        check(checkpoint, name)
    assert checkpoint.read_rows("empty", 0, 0).shape == (0, 4)
    with pytest.raises(CetaneError, match=r"'scalar' of shape \(\) has no rows"):
        checkpoint.read_rows("scalar", 0, 0)
    with pytest.raises(CetaneError, match="no tensor 'x'"):
        checkpoint.read_rows("x", 0, 1)


def test_safetensors_reads_nothing_else(folder: Path) -> None:
    """What follows the rows may be gone by now."""
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes(path.read_bytes()[: header + 7 * 8])  # "b", of the widest dtype, is first
    assert checkpoint.read_rows("b", 2, 7).tolist() == [2, 3, 4, 5, 6]
    path.write_bytes(path.read_bytes()[: header + 3 * 8])
    assert checkpoint.read_rows("b", 1, 3).tolist() == [1, 2]
    with pytest.raises(CetaneError, match="became shorter"):
        checkpoint.read_rows("b", 1, 4)


@pytest.mark.parametrize("quantization", [None, gguf.GGMLQuantizationType.BF16])
def test_gguf(
    quantization: gguf.GGMLQuantizationType | None,
    tiny_model: Callable[[str], transformers.PreTrainedModel],
    write_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), quantization=quantization)
    checkpoint = open_checkpoint(path)
    # The file has q_proj's rows in another order.
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        check(checkpoint, name)
