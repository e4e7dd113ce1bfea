"""A model's answers to some tokens: its likeliest next tokens, which a student learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cetane.files import Progress
from cetane.fitting.bfloat16 import narrowed
from cetane.fitting.losses import in_pieces

LIKELIEST = 64
"""Tokens whose probabilities are kept; the others count together. All would take 100 kB a token."""
LEAST = 1e-6
"""The least probability of all other tokens together, since its logarithm is taken."""


@dataclass(frozen=True)
class Answers:
    """Sequences, and what a model expects after each of their tokens."""

    tokens: Tensor
    """int64 `(N, T)`."""
    likely: Tensor
    """The likeliest next tokens, int32 `(N, T, K)`."""
    logs: Tensor
    """Logarithms of their probabilities, fp16 `(N, T, K)`."""

    def batch(self, rows: Tensor) -> Answers:
        return Answers(self.tokens[rows], self.likely[rows], self.logs[rows])

    def divergence(self, logits: Tensor) -> Tensor:
        """The mean KL of logits `(N, T, V)` from these answers. All tokens that are not kept count
        as one."""
        names = self.likely.to(logits.device, torch.int64).flatten(0, 1)
        logs = self.logs.to(logits.device, torch.float32).flatten(0, 1)

        def of_rows(own: Tensor, rows: slice) -> Tensor:
            teacher = logs[rows]
            student = own.gather(1, names[rows]) - torch.logsumexp(own, -1, keepdim=True)
            rest = (others(teacher), others(student))
            likely = (teacher.exp() * (teacher - student)).sum()
            return likely + (rest[0] * (rest[0].log() - rest[1].log())).sum()

        return in_pieces(logits.flatten(0, 1), of_rows) / len(names)


def others(logs: Tensor) -> Tensor:
    """The probability of all tokens but those with these logarithms."""
    return (1 - logs.exp().sum(-1)).clamp(min=LEAST)


@torch.no_grad()
def ask(model: Any, tokens: Tensor, size: int, progress: Progress) -> Answers:
    """A transformers model's answers to `tokens (N, T)`, `size` sequences at a time."""
    likely, logs = [], []
    with narrowed(model):
        for start in range(0, len(tokens), size):
            progress("the model answers", start, len(tokens))
            part = tokens[start : start + size].to(model.device)
            logits = model(part, use_cache=False).logits.float()
            top = logits.topk(min(LIKELIEST, logits.shape[-1]))
            likely.append(top.indices.int().cpu())
            logs.append((top.values - torch.logsumexp(logits, -1, keepdim=True)).half().cpu())
    progress("the model answers", len(tokens), len(tokens))
    return Answers(tokens, torch.cat(likely), torch.cat(logs))
