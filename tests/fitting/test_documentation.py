"""Documentation that weights are fitted on: none that is judged, and the same every time."""

from pathlib import Path

import pytest
import torch

from cetane.checkpoint import open_checkpoint
from cetane.fitting import documentation as module
from cetane.fitting.documentation import MODULES, documentation, spread, windows_of
from cetane.lab import workload


def test_nothing_that_is_judged_is_read() -> None:
    judged = {name.partition(".")[0] for name in workload.MODULES}
    assert not judged & {name.partition(".")[0] for name in MODULES}
    found = documentation()
    assert len(found) > len(MODULES), "topics of the language too"
    for name, text in zip(MODULES, found, strict=False):
        assert name in text.partition("\n")[0]


def test_a_long_text_is_read_in_slices_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICES", 4)
    monkeypatch.setattr(module, "SLICE", 3)
    text = "abcdefghijklmnopqrstuvwxyz"
    assert spread(text[:12]) == [text[:12]]
    assert spread(text) == ["abc", "hij", "pqr", "xyz"]
    assert spread(text[:13]) == ["abc", "def", "ghi", "klm"]


def test_windows_hold_the_text_once(tiny_checkpoint_folder: Path) -> None:
    tokenizer = open_checkpoint(tiny_checkpoint_folder).tokenizer
    texts = documentation()[:3]
    windows = windows_of(texts, tokenizer, 3, 64)
    assert windows.dtype == torch.int64 and windows.shape[1] == 64
    assert windows[::2, 0].unique().tolist() == [3]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert len(windows) == tokens // 64
    assert torch.equal(windows, windows_of(texts, tokenizer, 3, 64))
