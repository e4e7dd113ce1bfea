"""What a bundle needs before a draft head is trained for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline import draft_head
from cetane.pipeline.draft_head import train_draft_head
from cetane.pipeline.draft_head_result import DraftHeadSettings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": {"kind": "single"}}, "need a shard that hands on the last layer"),
        ({"verify": None, "prefill": None}, "no call wider than one token"),
    ],
)
def test_a_bundle_that_cannot_draft_is_refused_before_the_model_writes(
    tiny_bundle: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(draft_head, "own_conversations", lambda *call: asked.append(call))
    with pytest.raises(CetaneError, match=message):
        train_draft_head(tiny_bundle(**options).path, "medusa", [])
    assert not asked


def test_no_minutes_are_refused_before_the_bundle_is_read(tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="0 minutes: no time to train"):
        train_draft_head(tmp_path / "none", "eagle3", [], settings=DraftHeadSettings(minutes=0))
