"""The choice of tokens, beside counting by hand and transformers' own choices."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.reference import Reference
from cetane.pipeline.vocabulary import (
    HELD_OUT,
    UNIT,
    WINDOW,
    CoveredText,
    covered_text,
    fewest,
    make_subset,
    ranked,
    split,
    with_choices,
)

VOCABULARY = 1000


def text(tokens: list[int], choices: list[int] = ()) -> CoveredText:  # type: ignore[assignment]
    return CoveredText("a", "0" * 64, np.array(tokens, np.int64), np.array(choices, np.int64))


words = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60)


@given(words, words | st.just([]), st.sets(st.integers(0, 1200)), st.floats(0.5, 1.0))
def test_the_fewest_tokens_that_cover_texts_and_choices(
    tokens: list[int], choices: list[int], necessary: set[int], coverage: float
) -> None:
    texts = [text(tokens, choices), text(tokens[:1])]
    order = ranked(texts, VOCABULARY, necessary)
    assert sorted(order) == list(range(VOCABULARY))
    inside = {t for t in necessary if t < VOCABULARY}
    assert set(order[: len(inside)].tolist()) == inside
    size = fewest(texts, order, len(inside), coverage)
    assert size % UNIT == 0 or size == VOCABULARY
    for stream in filter(None, ([*tokens, tokens[0]], choices)):
        counts = Counter(stream)

        def covered(rows: int, counts: Counter[int] = counts) -> float:
            return sum(counts[t] for t in order[:rows].tolist()) / counts.total()

        assert covered(size) >= coverage - 1e-9
    if size - UNIT >= len(inside):
        assert any(
            sum(Counter(s)[t] for t in order[: size - UNIT].tolist()) / len(s) < coverage
            for s in filter(None, ([*tokens, tokens[0]], choices))
        )


def test_frequent_tokens_come_first_and_unseen_ones_by_id() -> None:
    order = ranked([text([5, 5, 7], [9])], 12, {3})
    assert order.tolist() == [3, 9, 5, 7, 0, 1, 2, 4, 6, 8, 10, 11]


def test_every_tenth_window_is_held_out() -> None:
    whole = text(list(range(25 * WINDOW + 3)))
    chosen, held = split(whole)
    expected = [*range(9 * WINDOW, 10 * WINDOW), *range(19 * WINDOW, 20 * WINDOW)]
    assert held.tokens.tolist() == expected
    assert sorted([*chosen.tokens, *held.tokens]) == whole.tokens.tolist()
    with pytest.raises(CetaneError, match="too few"):
        split(text([1] * (HELD_OUT - 1) * WINDOW))


def test_what_a_subset_covers(tmp_path: Path, tiny_checkpoint_folder: Path) -> None:
    tokenizer = open_checkpoint(tiny_checkpoint_folder).tokenizer
    order = np.arange(288)[::-1]
    subset = make_subset(order, 280, tokenizer, [text([1, 8, 9, 287], [7])], [text([7, 7, 8])])
    assert subset.ids.tolist() == list(range(8, 288))
    (found,), (held,) = subset.texts, subset.held_out
    assert (found.tokens, found.covered, found.choices, found.choices_covered) == (4, 3, 1, 0)
    assert (held.tokens, held.covered) == (3, 1)
    assert subset.missing == 3 / 5


def test_choices_are_the_models_own(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    file = tmp_path / "text.txt"
    file.write_text("The cetane number of a fuel ignites. " * 40)
    one = covered_text(checkpoint.tokenizer, file)
    (found,) = with_choices([one], Reference(checkpoint), 100_000, lambda *_: None)
    assert one.tokens.tolist() == checkpoint.tokenizer.encode(file.read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    expected: list[int] = []
    for start in range(0, len(one.tokens), WINDOW):
        ids = torch.from_numpy(one.tokens[start : start + WINDOW])[None]
        with torch.inference_mode():
            expected += model(ids).logits[0].argmax(1).tolist()
    assert found.choices.tolist() == expected
    (few,) = with_choices([one], Reference(checkpoint), 1, lambda *_: None)
    assert few.choices.tolist() == expected[:WINDOW]
