"""The Hugging Face model whose heads stream: against eager attention with masks, and in pieces."""

import pytest
import torch
from tests.conftest import build_model
from tests.families.parity import tokens
from tests.families.streaming_models import KEPT, LENGTH, NINE, SINKS, WINDOW, masked
from transformers import DynamicCache

from cetane.checkpoint import SeenByHeads
from cetane.errors import CetaneError
from cetane.fitting.cache import extending
from cetane.gates import streaming
from cetane.gates.streaming import StreamingAttention, attending, let_stream

SEEN = SeenByHeads(KEPT, SINKS, WINDOW)


@pytest.mark.parametrize("block", [7, 256])
def test_as_eager_attention_with_masks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", block)
    model, expected = build_model("llama", **NINE), torch.tensor(0)
    expected = torch.from_numpy(masked(model, KEPT))
    plain = torch.from_numpy(masked(model, {}))
    ids = torch.tensor([tokens(model.config.vocab_size, LENGTH)])
    with torch.no_grad():
        with attending(model, StreamingAttention(SEEN)):
            assert (model(ids).logits[0] - expected).abs().max() < 1e-4
        assert (model(ids).logits[0] - plain).abs().max() < 1e-5  # it attends as before
        let_stream(model, SEEN)
        cache = DynamicCache()
        pieces = [model(ids[:, a:b], **extending(model, cache)).logits[0]
                  for a, b in ((0, 30), (30, 31), (31, LENGTH))]  # fmt: skip
        assert (torch.cat(pieces) - expected).abs().max() < 1e-4


def test_sinks_are_the_first_positions() -> None:
    """A text that begins later has none."""
    model = build_model("llama", **NINE)
    expected = torch.from_numpy(masked(model, KEPT, sinks=0))
    let_stream(model, SEEN)
    ids = torch.tensor([tokens(model.config.vocab_size, LENGTH)])
    with torch.no_grad():
        found = model(ids, position_ids=torch.arange(LENGTH)[None] + 100).logits[0]
    assert (found - expected).abs().max() < 1e-3  # positions turn alike, but for rounding


def test_rows_of_a_batch_have_their_own_sinks() -> None:
    model = build_model("llama", **NINE)
    let_stream(model, SEEN)
    ids = torch.tensor([tokens(model.config.vocab_size, LENGTH)])
    at = torch.arange(LENGTH)[None]
    with torch.no_grad():
        alone = [model(ids, position_ids=at + start).logits[0] for start in (0, 100)]
        both = model(ids.repeat(2, 1), position_ids=torch.cat([at, at + 100])).logits
    assert (alone[0] - alone[1]).abs().max() > 0.01
    for row, expected in zip(both, alone, strict=True):
        assert (row - expected).abs().max() < 1e-5


def test_scores_must_be_plain() -> None:
    with pytest.raises(CetaneError, match="heads of a gemma2 cannot stream"):
        let_stream(build_model("gemma2", head_dim=16), SEEN)
