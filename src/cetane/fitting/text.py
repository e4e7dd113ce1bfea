"""Text that a model wrote itself: what its weights are fitted on.

Sampled from the model, it has the model's own distribution, needs no download, and holds nothing
that a gate judges on (data-free distillation, as in LLM-QAT, arXiv 2305.17888).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cetane.files import Progress

SPREAD = 1 / 2
"""A sequence's second token is any of the likelier half of the vocabulary, so that texts differ.
With the likeliest 2,000 alone, four bits of SmolLM2 cost prose 10 % more KL: few texts were code,
or of other languages."""
LEAST = 0.05
"""Of the likeliest token's probability: what is less likely is never drawn (min-p, arXiv
2407.01082). Else small models write no words after some tens of tokens."""
BATCH = 128
"""Sequences that are written side by side."""


def write_text(
    model: Any, start: int, sequences: int, length: int, seed: int, progress: Progress
) -> Tensor:
    """Sampled tokens, int64 `(sequences, length)`.

    Every other sequence begins with `start`. The others lack it, as texts do that a model is given
    without its template: the first token, whichever it is, draws much attention.
    `model` is a causal transformers model; the same seed gives the same text on one machine.
    """
    random = torch.Generator().manual_seed(seed)
    parts = []
    for first in range(0, sequences, BATCH):
        progress("the model writes its own text", first, sequences)
        count = min(BATCH, sequences - first)
        parts.append(write_batch(model, start, count, length + 1, random))
    progress("the model writes its own text", sequences, sequences)
    text = torch.cat(parts)
    return torch.where(torch.arange(sequences)[:, None] % 2 == 0, text[:, :-1], text[:, 1:])


def drawn_from(logits: Tensor, random: torch.Generator) -> Tensor:
    """One index of each row `(B, V)`, as likely as its logit says, int64 `(B, 1)`; of those that
    are too unlikely, none.

    The largest of logits with Gumbel's noise is drawn as often as it is likely. So only the few
    tokens that can be drawn need a number; `torch.multinomial` draws one for the whole vocabulary.
    """
    least = logits.amax(1, keepdim=True) + math.log(LEAST)
    rows, columns = (logits >= least).nonzero(as_tuple=True)
    noise = torch.rand(len(rows), generator=random, dtype=torch.float64)
    scores = logits[rows, columns].double() - torch.log(-torch.log(noise))
    lowest = torch.full((len(logits),), -math.inf, dtype=torch.float64)
    best = lowest.scatter_reduce(0, rows, scores, "amax")
    drawn = torch.zeros(len(logits), 1, dtype=torch.int64)
    won = scores == best[rows]
    drawn[rows[won], 0] = columns[won]
    return drawn


@torch.no_grad()
def write_batch(
    model: Any, start: int, sequences: int, length: int, random: torch.Generator
) -> Tensor:
    """One batch of `write_text`."""
    from cetane.fitting.cache import roomy_cache  # here because transformers takes a while

    tokens = torch.full((sequences, 1), start)
    cache, read = roomy_cache(model, length), tokens
    while tokens.shape[1] < length:
        made = model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = made.logits[:, -1].float()
        if tokens.shape[1] == 1:
            likely = logits.topk(round(SPREAD * logits.shape[1])).indices
            drawn = torch.randint(0, likely.shape[1], (sequences, 1), generator=random)
            read = likely.gather(1, drawn)
        else:
            read = drawn_from(logits, random)
        tokens = torch.cat([tokens, read], 1)
    return tokens
