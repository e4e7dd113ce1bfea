"""The conversations that a model writes for its draft heads: how much, and kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from cetane.errors import CetaneError
from cetane.pipeline import draft_head_text
from cetane.pipeline.draft_head_result import DraftHeadSettings
from cetane.pipeline.draft_head_text import own_conversations, whole_windows

CHECKPOINT: Any = SimpleNamespace(fingerprint="ab" * 32, tokenizer=None)
WINDOW = 5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of the batches that were written."""
    batches: list[int] = []

    def write(number: int) -> torch.Tensor:
        batches.append(number)
        return torch.full((2, WINDOW), number)

    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    monkeypatch.setattr(draft_head_text, "TOGETHER", 2)
    monkeypatch.setattr(draft_head_text, "conversations_of", lambda checkpoint, window: write)
    return batches


def own(settings: DraftHeadSettings) -> dict[Path, torch.Tensor]:
    return own_conversations(CHECKPOINT, WINDOW, settings, lambda *_: None)


def test_a_model_writes_as_much_as_is_asked_once(asked: list[int]) -> None:
    some = own(DraftHeadSettings(tokens=14))
    assert asked == [0, 1] and all(path.exists() for path in some)
    assert [tokens.unique().tolist() for tokens in some.values()] == [[0], [1]]
    assert own(DraftHeadSettings(tokens=14)).keys() == some.keys() and asked == [0, 1]
    more = own(DraftHeadSettings(tokens=24))
    assert asked == [0, 1, 2] and list(more)[:2] == list(some)


def test_what_is_damaged_or_changed_is_written_again(asked: list[int]) -> None:
    (path,) = own(DraftHeadSettings(tokens=4))
    other = save({draft_head_text.TOKENS: torch.ones(2, WINDOW, dtype=torch.int64)})
    for times, content in enumerate((b"no tensors", other), 2):
        path.write_bytes(content)
        (tokens,) = own(DraftHeadSettings(tokens=4)).values()
        assert asked == [0] * times and torch.equal(tokens, torch.zeros_like(tokens))


def test_it_writes_no_longer_than_a_third_of_the_time(asked: list[int]) -> None:
    own(DraftHeadSettings(minutes=0))
    assert asked == [0]


def test_a_model_that_is_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    monkeypatch.setattr(draft_head_text, "Reference", lambda _: SimpleNamespace(resident=False))
    with pytest.raises(CetaneError, match=r"too large to write its own text here \(give one: --te"):
        own(DraftHeadSettings())


def test_the_ends_of_texts_that_fill_no_window_are_left_out() -> None:
    assert whole_windows([[*range(7)], [*range(4)], [*range(10, 15)]], 5) == [
        *range(5), *range(10, 15)
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [[], [3], [9], [4, 4, 4]])
def test_too_little_text(lengths: list[int]) -> None:
    """It tells the tokens that were given, not those in whole windows."""
    with pytest.raises(CetaneError, match=f"^{sum(lengths)} tokens of text: too few for two windo"):
        whole_windows([[1] * length for length in lengths], 5)
