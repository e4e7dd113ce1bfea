"""Attention of a model that is fitted gives what transformers' own gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cetane.fitting.attention import NAME, fuse_attention
from cetane.fitting.cache import extending, roomy_cache


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_it_attends_as_transformers_does(kind: str, tiny_model: Callable[..., Any]) -> None:
    """All at once, and token by token behind a cache. Gemma's window is shorter than the text."""
    model = tiny_model(kind)
    tokens = torch.randint(0, 288, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = model(tokens).logits
        fuse_attention(model)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)
        cache = roomy_cache(model, 16)
        parts = [model(part, **extending(model, cache)).logits
                 for part in tokens.split([5, *[1] * 11], 1)]  # fmt: skip
    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(torch.cat(parts, 1), before, rtol=1e-4, atol=1e-5)


def test_scores_with_a_cap_stay_transformers_own(tiny_model: Callable[..., Any]) -> None:
    capped = tiny_model("gemma2")
    fuse_attention(capped)
    assert capped.config._attn_implementation == "eager"
