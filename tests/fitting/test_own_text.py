"""The text that a model writes: its beginnings, and what is never drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cetane.files import Progress, silent
from cetane.fitting import own_text
from cetane.fitting.own_text import LEAST, TextWriter, drawn_from

START = 7


def write(
    model: Any, sequences: int, length: int, place: Path, *, seed: int = 1,
    openings: Sequence[Sequence[int]] = (), progress: Progress = silent,
) -> torch.Tensor:  # fmt: skip
    """A text whose every other sequence begins with `START`."""
    return TextWriter(model, START, length, openings, progress).write(sequences, seed, place)


def test_every_other_sequence_begins_with_the_start(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    text = write(model, 6, 12, tmp_path / "1")
    assert text.shape == (6, 12) and text.dtype == torch.int64
    assert (text[0::2, 0] == START).all()
    assert len(set(text[1::2, 0].tolist())) > 1
    torch.testing.assert_close(text, write(model, 6, 12, tmp_path / "2"))
    assert not torch.equal(text, write(model, 6, 12, tmp_path / "3", seed=2))


def test_half_of_the_sequences_go_on_with_an_opening(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """With and without the start; what follows is written, and differs."""
    model = tiny_model("llama")
    given = [[11, 12, 13], [14, 15, 16]]
    text = write(model, 32, 12, tmp_path, openings=given).tolist()
    begun = [row[1:4] if row[0] == START else row[:3] for row in text]
    assert [row in given for row in begun] == [False, False, True, True] * 8
    assert all(opening in begun for opening in given)
    assert len({tuple(row) for row in text}) == 32
    assert [row[0] == START for row in text] == [True, False] * 16


def test_an_opening_as_long_as_the_sequence_is_cut(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    given = [list(range(20, 50))]
    text = write(tiny_model("llama"), 4, 8, tmp_path, openings=given)
    assert text[2].tolist() == [START, *range(20, 27)]
    assert text[3].tolist() == list(range(20, 28))


def test_a_text_that_was_interrupted_goes_on_and_is_the_same(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its first batch is not written again, unless its file is damaged."""
    model = tiny_model("llama")
    monkeypatch.setattr(own_text, "BATCH", 4)
    undisturbed = write(model, 10, 12, tmp_path / "whole")
    sizes: list[int] = []

    def stop(_what: str, done: int, _total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    def watch(*given: Any) -> torch.Tensor:
        sizes.append(len(given[1]))
        return write_batch(*given)

    write_batch = own_text.write_batch
    monkeypatch.setattr(own_text, "write_batch", watch)
    caplog.set_level("INFO", "cetane")
    for damaged in (False, True):
        place = tmp_path / str(damaged)
        with pytest.raises(KeyboardInterrupt):
            write(model, 10, 12, place, progress=stop)
        if damaged:
            (place / "000.safetensors").write_bytes(b"half a file")
        assert torch.equal(write(model, 10, 12, place), undisturbed)
    assert sizes == [4, 4, 2, 4, 4, 4, 2]
    (told,) = caplog.messages
    assert "4 of 10 sequences" in told


def test_unlikely_tokens_are_never_drawn(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.data *= 6  # most tokens are unlikely
    text = write(model, 8, 12, tmp_path)[0::2]
    with torch.no_grad():
        shares = torch.softmax(model(text).logits, -1)[:, 1:-1]  # the second token is any
    drawn = shares.gather(2, text[:, 2:, None])[..., 0]
    assert (shares < LEAST * shares.amax(-1, keepdim=True)).float().mean() > 0.5
    assert (drawn >= 0.9 * LEAST * shares.amax(-1)).all()
    assert (drawn < shares.amax(-1)).any()


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])  # none of the others, at either end
    logits = shares.log().expand(4000, 5)
    drawn = drawn_from(logits, torch.Generator().manual_seed(0))[:, 0]
    assert set(drawn.tolist()) == {1, 3}
    assert abs(float((drawn == 3).float().mean()) - 0.75) < 0.03  # four standard errors


def test_a_roomy_cache_is_a_cache(tiny_model: Callable[..., Any]) -> None:
    """Token by token with it, as all at once without one."""
    from cetane.fitting.cache import RoomyLayer, extending, roomy_cache

    for kind in ("llama", "gemma3_text"):
        model = tiny_model(kind)
        tokens = torch.randint(0, 288, (2, 9), generator=torch.Generator().manual_seed(3))
        cache = roomy_cache(model, 9)
        assert kind != "llama" or all(isinstance(own, RoomyLayer) for own in cache.layers)
        with torch.no_grad():
            parts = [model(part, **extending(model, cache)).logits
                     for part in tokens.split([3, 1, 5], 1)]  # fmt: skip
            wanted = model(tokens, use_cache=False).logits
        torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_cache_goes_by_the_name_that_a_model_knows(tiny_model: Callable[..., Any]) -> None:
    """transformers renames the argument, and warns of the old name."""
    from cetane.fitting.cache import extending, roomy_cache

    model = tiny_model("llama")
    cache = roomy_cache(model, 3)
    model(torch.tensor([[1, 2, 3]]), **extending(model, cache))
    assert cache.get_seq_length() == 3

    class Older:
        def forward(
            self, input_ids: Any, past_key_values: Any = None, use_cache: Any = None
        ) -> None:
            """Has the arguments of transformers 5.20."""

    assert set(extending(Older(), cache)) == {"past_key_values", "use_cache"}
