"""Keys that decoded tokens read, by who chooses them: one key that a query wants is among them."""

from typing import Any

import pytest
import torch
from tests.conftest import build_model
from tests.families.parity import tokens

from cetane.lab import sparse
from cetane.lab.sparse import CHOOSERS, Sparse, against, both_texts, run

LENGTH, DECODED, BUDGET = 160, 32, 64
START = LENGTH - DECODED


@pytest.fixture(autouse=True)
def few_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "DECODED", DECODED)


def seen(keys: Any, wanted: int, asking: slice) -> torch.Tensor:
    """The keys that decoded rows read, `(DECODED, LENGTH)`, if queries want that of one token."""
    k, q = torch.zeros(1, LENGTH, 4), torch.zeros(1, 2, LENGTH, 4)
    k[0, wanted, 1] = -3.0
    q[0, 1, asking, 1] = -2.0
    return CHOOSERS[keys](q, k, START, BUDGET)[0]


def test_newest() -> None:
    found = seen("newest", 70, slice(0, LENGTH))
    for row in range(DECODED):
        at = START + row
        newest = list(range(at - BUDGET + sparse.SINKS + 1, LENGTH))
        assert found[row].nonzero().flatten().tolist() == [*range(sparse.SINKS), *newest]


def test_quest_takes_the_page_that_its_query_wants() -> None:
    page = slice(64, 80)
    assert seen("quest", 70, slice(START, LENGTH))[:, page].all()
    found = seen("quest", 70, slice(START + 5, START + 6))  # only the sixth row asks
    late = seen("quest-stale", 70, slice(START + 5, START + 6))
    assert found[5, page].all() and late[6, page].all()
    for rows in (found, late):
        causal = rows & (torch.arange(LENGTH) <= torch.arange(START, LENGTH)[:, None])
        assert causal.sum(-1).max() <= BUDGET
        for row, at in enumerate(range(START, LENGTH)):
            assert causal[row, at // 16 * 16 - 16 : at + 1].all()  # its page, and the one before


def test_triforce_chooses_once() -> None:
    found = seen("triforce", 70, slice(START - 1, START))
    assert (found == found[0]).all() and found[0, 64:72].all() and found[0, :8].all()
    assert found[0, START:].all() and found[0, :START].sum() == BUDGET
    assert seen("triforce", 70, slice(START, LENGTH))[0, 64:72].sum() in (0, 8)


def test_all_keys_are_full_attention() -> None:
    model = build_model("llama", num_hidden_layers=4)
    ids = tokens(model.config.vocab_size, LENGTH)
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0, START:].log_softmax(-1)
    full = run(model, ids, Sparse())
    assert (full - plain).abs().max() < 1e-4
    target = torch.tensor(ids[1:])[-DECODED + 1 :]
    attention = Sparse(CHOOSERS["newest"], LENGTH + sparse.SINKS)
    assert against(run(model, ids, attention), full, target)[1:] == pytest.approx((0, 1), abs=1e-6)
    few = Sparse(CHOOSERS["newest"], BUDGET)
    assert against(run(model, ids, few), full, target)[1] > 1e-3
    assert len(few.mass) == 2 and max(few.mass) < 1


def test_a_text_that_repeats_its_beginning() -> None:
    texts = both_texts(list(range(200)), LENGTH)
    assert texts[""] == list(range(LENGTH))
    assert texts["copying"] == [*range(START), *range(DECODED)]
