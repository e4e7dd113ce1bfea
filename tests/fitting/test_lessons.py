"""Text for tuning: written once, and more of it where there is time."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from cetane.files import silent
from cetane.fitting import lessons as module
from cetane.fitting.own_text import TextWriter
from cetane.fitting.teacher import Answers

READ = torch.arange(100, 136).reshape(3, 12)
"""Windows of documentation."""
GIVEN = [[5, 6, 8]]
"""Openings of the model's own text."""


def lessons(model: Any, place: Path, seconds: float) -> Answers:
    return module.lessons(TextWriter(model, 7, 12, GIVEN, silent), READ, place, seconds)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEQUENCES", 3)
    monkeypatch.setattr(module, "READ", 1)
    monkeypatch.setattr(module, "LEAST", 8)
    monkeypatch.setattr(module, "MOST", 12)


def test_what_is_kept_is_not_written_again(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    made = lessons(model, tmp_path / "text", 0.0)
    assert made.tokens.shape == (module.LEAST, 12), "the least, though there is no time"
    more = lessons(model, tmp_path / "text", 60.0)
    assert len(more.tokens) == module.MOST
    torch.testing.assert_close(more.tokens[: len(made.tokens)], made.tokens)
    assert len({tuple(row.tolist()) for row in more.tokens}) == module.MOST
    begun = [row[:4].tolist() == [7, *GIVEN[0]] for row in more.tokens]
    assert sum(begun) == module.MOST // 4, "the third of every three goes on with an opening"
    monkeypatch.setattr(TextWriter, "write", None)
    again = lessons(model, tmp_path / "text", 60.0)
    torch.testing.assert_close(again.tokens, more.tokens)
    torch.testing.assert_close(again.logs, more.logs)


def test_each_part_reads_the_next_windows(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    made = lessons(tiny_model("llama"), tmp_path, 60.0).tokens.tolist()
    for number, window in enumerate(READ.tolist()):
        assert [window in made[start : start + 4] for start in (0, 4, 8)] == [
            part == number for part in range(3)
        ]


def test_a_gpu_writes_more_side_by_side(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch; "meta" stands for a GPU, whose text is given here."""
    model, asked = tiny_model("llama"), []

    def write(writer: TextWriter, sequences: int, *_: Any) -> torch.Tensor:
        asked.append(sequences)
        return torch.full((sequences, writer.length), writer.start)

    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    monkeypatch.setattr(module, "narrowed", lambda _: nullcontext())
    monkeypatch.setattr(TextWriter, "write", write)
    monkeypatch.setattr(
        module, "ask", lambda _, text, *rest: Answers(text, text.int(), text.half())
    )
    made = lessons(model, tmp_path, 0.0).tokens.tolist()
    assert asked == [3 * module.WIDER]
    assert all(window in made for window in READ.tolist()), "as many windows as there are"


def test_answers_are_those_to_the_text(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = lessons(model, tmp_path, 0.0)
    with torch.inference_mode():
        truth = torch.log_softmax(model(made.tokens).logits, -1)
    top = truth.topk(made.logs.shape[-1]).values
    torch.testing.assert_close(made.logs.float(), top, atol=0.02, rtol=0.02)
    chosen = truth.gather(-1, made.likely.long())
    torch.testing.assert_close(made.logs.float(), chosen, atol=0.02, rtol=0.02)


def test_a_damaged_or_changed_file_is_written_again(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model, path = tiny_model("llama"), tmp_path / "001.safetensors"
    made = lessons(model, tmp_path, 0.0)
    changed = {name: torch.zeros_like(own) for name, own in load_file(path).items()}
    for content in (b"half a file", save(changed)):
        path.write_bytes(content)
        again = lessons(model, tmp_path, 0.0)
        torch.testing.assert_close(again.tokens, made.tokens)
        torch.testing.assert_close(again.logs, made.logs)
