"""Folders for ANEMLL are played and compared: a wrong lowering is red, a right one is green."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import build_tokenizer, tiny_recipe
from tests.families.gemma_models import build_gemma3
from torch import Tensor

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.export.anemll.adapter import Chunk
from cetane.files import silent
from cetane.pipeline.build import build
from cetane.pipeline.export import export_runtime
from cetane.schema.interface import Input, Rotary


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Gemma 3, whose window of 32 tokens is half of the context; its rows are int8."""
    root = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    build_gemma3().save_pretrained(root / "checkpoint")
    build_tokenizer().save_pretrained(root / "checkpoint")
    recipe = tiny_recipe(context=64, prefill=8, embedding={"format": "int8"})
    return build(open_checkpoint(root / "checkpoint"), recipe, root / "bundle", silent)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head": {"choose": True}},
        {"compression": {"types": {"head": "palette6-kmeans-per-tensor"}}},
    ],
    ids=["logits", "choices", "a head of other codes"],
)
def test_a_right_folder(
    tiny_bundle: Callable[..., Bundle], options: dict[str, Any], tmp_path: Path
) -> None:
    made = export_runtime(tiny_bundle(**options).path, tmp_path / "folder", "anemll")
    assert made.passed and len(made.checks) >= 2 and not made.unjudged


@pytest.mark.parametrize("head", [{}, {"choose": True}], ids=["logits", "choices"])
def test_a_wrong_rotation(
    tiny_bundle: Callable[..., Bundle],
    head: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sines of the next position: the contract is kept, and only numbers show it."""
    bundle = tiny_bundle(head=head)
    right = Chunk.given

    def given(
        chunk: Chunk, item: Input, hidden: Tensor, positions: Tensor, mask: Tensor, current: Tensor
    ) -> Tensor:
        late = int(isinstance(item.source, Rotary) and item.source.part == "sin")
        return right(chunk, item, hidden, positions + late, mask, current)

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Chunk, "given", given)
    made = export_runtime(bundle.path, tmp_path / "folder", "anemll")
    assert not made.problems and not made.passed
    assert not (made.path / "cetane.json").exists()


def test_a_window(windowed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, other functions run: a wrong mask there is red there alone."""
    right = export_runtime(windowed.path, tmp_path / "right", "anemll")
    assert right.passed and not right.unjudged
    own = Chunk.mask

    def mask(chunk: Chunk, group: str, mask: Tensor, positions: Tensor) -> Tensor:
        made = own(chunk, group, mask, positions)
        return made * 0 if chunk.rings and chunk.tokens > 1 and group in chunk.rings else made

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Chunk, "mask", mask)
    wrong = export_runtime(windowed.path, tmp_path / "wrong", "anemll")
    red = {check.name.partition(":")[0] for check in wrong.checks if not check.passed}
    assert red == {"steps 47 to 58 after a prefill of 48"}
