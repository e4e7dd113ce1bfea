"""Folders for ANEMLL are played and compared: a wrong lowering is red, a right one is green."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from cetane.gates import anemll
from cetane.gates.anemll import Play
from cetane.pipeline.build import build
from cetane.pipeline.export import export_runtime
from cetane.pipeline.origin import checkpoint_of
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


@pytest.fixture(
    params=[
        {},
        {"head": {"choose": True}},
        {"compression": {"types": {"head": "palette6-kmeans-per-tensor"}}},
        {"embedding": {"inside": True}},
    ],
    ids=["logits", "choices", "a head of other codes", "an embedding inside"],
)
def bundle(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(**request.param)


def test_a_right_folder(bundle: Bundle, tmp_path: Path) -> None:
    made = export_runtime(bundle.path, tmp_path / "folder", "anemll")
    assert made.passed and len(made.checks) >= 2 and not made.unjudged


def test_a_wrong_rotation(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sines of the next position: the contract is kept, and only numbers show it."""
    right = Chunk.given

    def given(
        chunk: Chunk, item: Input, hidden: Tensor, positions: Tensor, mask: Tensor, current: Tensor
    ) -> Tensor:
        late = int(isinstance(item.source, Rotary) and item.source.part == "sin")
        later = (positions + late).clamp(max=chunk.sizes.context - 1)
        return right(chunk, item, hidden, later, mask, current)

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Chunk, "given", given)
    made = export_runtime(bundle.path, tmp_path / "folder", "anemll")
    assert not made.problems and not made.passed
    assert not (made.path / "cetane.json").exists()


def test_a_small_error_of_choices(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its choices are nearly the bundle's; their logits are not."""
    bundle, own = tiny_bundle(head={"choose": True}), Chunk.given

    def given(chunk: Chunk, item: Input, *tensors: Tensor) -> Tensor:
        return own(chunk, item, *tensors) * (0.98 if isinstance(item.source, Rotary) else 1)

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Chunk, "given", given)
    made = export_runtime(bundle.path, tmp_path / "folder", "anemll")
    red = {check.name.partition(": ")[2] for check in made.checks if not check.passed}
    assert red == {"error of the chosen logits"}


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
    assert red == {"steps 47 to 63 after a prefill of 48"}


def red_plays(bundle: Bundle, folder: Path) -> set[str]:
    """The plays in which a folder is wrong."""
    checkpoint = checkpoint_of(bundle, None, None)
    checks, _ = anemll.judge_anemll(bundle, checkpoint, folder, silent)
    return {check.name.partition(":")[0] for check in checks if not check.passed}


def test_the_end_of_the_context(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary rows beyond position 50 are those of 50. A short context is filled; at the end of a
    long one, nothing is before the text."""
    bundle, own = tiny_bundle(), Chunk.given
    right = export_runtime(bundle.path, tmp_path / "right", "anemll")

    def given(
        chunk: Chunk, item: Input, hidden: Tensor, positions: Tensor, mask: Tensor, current: Tensor
    ) -> Tensor:
        rows = positions.clamp(max=50) if isinstance(item.source, Rotary) else positions
        return own(chunk, item, hidden, rows, mask, current)

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Chunk, "given", given)
    wrong = export_runtime(bundle.path, tmp_path / "wrong", "anemll")
    assert not wrong.passed
    assert red_plays(bundle, wrong.path) == {"steps 47 to 63 after a prefill of 48"}
    monkeypatch.setattr(anemll, "LONGEST", 32)
    assert red_plays(bundle, wrong.path) == {"steps 52 to 63 after a prefill of 16"}
    assert red_plays(bundle, right.path) == set()


@pytest.mark.parametrize(
    ("context", "window", "last", "unjudged"),
    [
        (1024, None, Play(960, 1024), []),
        (4096, None, Play(128, 139, 3957), ["positions 139 to 3,956"]),
        (1024, 512, Play(960, 1024), []),
        (4096, 512, Play(640, 651), ["positions 651 to 4,095"]),
        (4096, 4096, Play(128, 139, 3957), ["positions 139 to 3,956"]),
        (4096, 2048, Play(128, 139), ["positions beyond the window of 2048 tokens",
                                      "positions 139 to 4,095"]),
    ],
)  # fmt: skip
def test_what_is_played(context: int, window: int | None, last: Play, unjudged: list[str]) -> None:
    folder: Any = SimpleNamespace(context=context, window=window, batch=64)
    plays, left_out = anemll.plays_of(folder)
    assert plays[0] == Play(0, 12) and plays[-1] == last and left_out == unjudged
    assert all(play.first + play.tokens <= context for play in plays)
