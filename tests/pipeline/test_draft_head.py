"""The text that a model writes for its draft heads: how much, and kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.pipeline import draft_head
from cetane.pipeline.draft_head import DraftHeadSettings, own_answers

CHECKPOINT: Any = SimpleNamespace(
    fingerprint="ab" * 32, tokenizer=SimpleNamespace(encode=lambda text: text.split())
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The number of the batches that were written: each two texts of three tokens."""
    batches: list[int] = []

    def write(model: Any, tokenizer: Any, questions: list[str]) -> Any:
        for number in range(1000):
            batches.append(number)
            yield [f"a b c{number}", f"d e f{number}"]

    reference = SimpleNamespace(model=None, resident=True)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    monkeypatch.setattr(draft_head, "write_answers", write)
    monkeypatch.setattr(draft_head, "Reference", lambda checkpoint: reference)
    return batches


def test_a_model_writes_as_much_as_is_asked_once(asked: list[int]) -> None:
    settings, seen = DraftHeadSettings(tokens=14), []
    path = own_answers(CHECKPOINT, settings, lambda *told: seen.append(told))
    assert path.read_text().split("\n")[:2] == ["a b c0", "d e f0"]
    assert len(path.read_text().split()) == 18 and asked == [0, 1, 2]
    assert [done for _, done, _ in seen] == [6, 12, 14]
    assert own_answers(CHECKPOINT, settings, lambda *_: None) == path and asked == [0, 1, 2]
    more = own_answers(CHECKPOINT, DraftHeadSettings(tokens=20), lambda *_: None)
    assert more != path and len(asked) == 7


def test_it_writes_no_longer_than_a_third_of_the_time(asked: list[int]) -> None:
    own_answers(CHECKPOINT, DraftHeadSettings(minutes=0), lambda *_: None)
    assert asked == [0]


def test_a_model_that_is_too_large(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "Reference", lambda _: SimpleNamespace(resident=False))
    with pytest.raises(CetaneError, match=r"too large to write its own text here \(give one: --te"):
        own_answers(CHECKPOINT, DraftHeadSettings(), lambda *_: None)
