"""Text that a model wrote itself: what its weights are fitted on.

Sampled from the model, it has the model's own distribution, needs no download, and holds nothing
that a gate judges on (data-free distillation, as in LLM-QAT, arXiv 2305.17888).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cetane.files import Progress

SPREAD = 2000
"""A sequence's second token is any of so many that may follow the first, so that texts differ."""
BATCH = 64
"""Sequences that are written side by side."""


def write_text(
    model: Any, start: int, sequences: int, length: int, seed: int, progress: Progress
) -> Tensor:
    """Sampled tokens, int64 `(sequences, length)`, each sequence beginning with `start`.

    `model` is a causal transformers model; the same seed gives the same text on one machine.
    """
    random = torch.Generator().manual_seed(seed)
    parts = []
    for first in range(0, sequences, BATCH):
        progress("the model writes its own text", first, sequences)
        parts.append(write_batch(model, start, min(BATCH, sequences - first), length, random))
    progress("the model writes its own text", sequences, sequences)
    return torch.cat(parts)


@torch.no_grad()
def write_batch(
    model: Any, start: int, sequences: int, length: int, random: torch.Generator
) -> Tensor:
    """One batch of `write_text`."""
    from transformers import DynamicCache

    tokens = torch.full((sequences, 1), start)
    cache, read = DynamicCache(config=model.config), tokens
    while tokens.shape[1] < length:
        logits = model(read, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if tokens.shape[1] == 1:
            likely = logits.topk(min(SPREAD, logits.shape[1])).indices
            drawn = torch.randint(0, likely.shape[1], (sequences, 1), generator=random)
            read = likely.gather(1, drawn)
        else:
            read = torch.multinomial(torch.softmax(logits.float(), -1), 1, generator=random)
        tokens = torch.cat([tokens, read], 1)
    return tokens
