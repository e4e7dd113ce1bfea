"""A head's choice against numpy's argmax: any number of rows, ties, and what is no number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.families.choice import argmax, choose
from cetane.schema.interface import choice_block


@given(
    rows=st.integers(1, 700), tokens=st.integers(1, 5), values=st.integers(1, 40),
    seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60)
def test_the_first_of_the_largest(rows: int, tokens: int, values: int, seed: int) -> None:
    """Few values, so that many rows are equal."""
    random = np.random.default_rng(seed)
    logits = random.integers(-values, values, (1, rows, tokens)).astype(np.float16)
    size = choice_block(rows)
    row, logit = (made.numpy() for made in choose(torch.from_numpy(logits), size))
    assert row.shape == (2, tokens)
    assert (row < 2048).all()
    assert (size * row[0] + row[1]).tolist() == logits[0].argmax(0).tolist()
    assert logit.tolist() == [logits[0].max(0).tolist()]


@pytest.mark.parametrize("time", [2, 3])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_by_argmax(time: int, softcap: float | None) -> None:
    logits = np.random.default_rng(0).normal(size=(1, 7, 5)).astype(np.float32) * 4
    row, logit = argmax(torch.from_numpy(logits).unsqueeze(5 - time), time, softcap)
    capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
    assert row.dtype == torch.int32
    assert row.tolist() == [logits[0].argmax(0).tolist()]
    assert np.allclose(logit, capped[0].max(0), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 2048, 16384, 24576, 131072, 262144, 1 << 22])
def test_blocks_count_in_fp16(rows: int) -> None:
    size = choice_block(rows)
    assert max(size, -(-rows // size)) <= 2048
    assert size & (size - 1) == 0


def test_what_is_no_number_is_not_chosen() -> None:
    """Where there is no number at all, the row is beyond the last, which a host refuses."""
    logits = torch.full((1, 9, 1), torch.nan)
    size = choice_block(9)
    block, place = choose(logits, size)[0].flatten().tolist()
    assert size * block + place >= 9
