"""Documentation that weights are fitted on: none that is judged, and the same every time."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from cetane.checkpoint import open_checkpoint
from cetane.fitting import human_text as module
from cetane.fitting.human_text import MODULES, documentation, spread, windows_of
from cetane.lab import workload


@pytest.fixture(scope="module")
def found() -> list[str]:
    """It takes seconds to render."""
    return documentation()


def test_nothing_that_is_judged_is_read(found: list[str]) -> None:
    judged = {name.partition(".")[0] for name in workload.MODULES}
    assert not judged & {name.partition(".")[0] for name in MODULES}
    assert len(found) > len(MODULES), "topics of the language too"
    for name, text in zip(MODULES, found, strict=False):
        assert name in text.partition("\n")[0]


def test_it_is_the_same_in_every_process(found: list[str]) -> None:
    """Addresses of objects differ between two runs, and paths between two machines."""
    text = "".join(found)
    assert not re.search("0x[0-9a-f]{9}", text)
    assert "copy_function=<function copy2>" in text
    assert str(Path(tempfile.__file__).parent) not in text and "tempdir = " not in text


def test_a_long_text_is_read_in_slices_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICES", 4)
    monkeypatch.setattr(module, "SLICE", 3)
    text = "abcdefghijklmnopqrstuvwxyz"
    assert spread(text[:12]) == [text[:12]]
    assert spread(text) == ["abc", "hij", "pqr", "xyz"]
    assert spread(text[:13]) == ["abc", "def", "ghi", "klm"]


def test_windows_hold_the_text_once(tiny_checkpoint_folder: Path, found: list[str]) -> None:
    tokenizer = open_checkpoint(tiny_checkpoint_folder).tokenizer
    texts = found[:3]
    windows = windows_of(texts, tokenizer, 3, 64)
    assert windows.dtype == torch.int64 and windows.shape[1] == 64
    assert windows[::2, 0].unique().tolist() == [3]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert len(windows) == tokens // 64
    assert torch.equal(windows, windows_of(texts, tokenizer, 3, 64))
