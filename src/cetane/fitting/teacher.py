"""What a model answers to some tokens: its likeliest next tokens, which another one learns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cetane.files import Progress

LIKELIEST = 64
"""Tokens whose probabilities are kept; the others count together. All would take 100 kB a token."""
LEAST = 1e-6
"""Of the probability of all others, whose logarithm is taken."""


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
        """The mean KL of logits `(N, T, V)` from these answers; unlikely tokens are one."""
        own = logits.float()
        total = torch.logsumexp(own, -1, keepdim=True)
        student = own.gather(2, self.likely.to(own.device, torch.int64)) - total
        teacher = self.logs.to(own.device, torch.float32)
        rest = (others(teacher), others(student))
        shares = teacher.exp()
        likely = (shares * (teacher - student)).sum(-1)
        return (likely + rest[0] * (rest[0].log() - rest[1].log())).mean()


def others(logs: Tensor) -> Tensor:
    """The probability of all tokens but those with these logarithms."""
    return (1 - logs.exp().sum(-1)).clamp(min=LEAST)


@torch.no_grad()
def ask(model: Any, tokens: Tensor, size: int, progress: Progress) -> Answers:
    """A transformers model's answers to `tokens (N, T)`, `size` sequences at a time."""
    likely, logs = [], []
    for start in range(0, len(tokens), size):
        progress("the model answers", start, len(tokens))
        with quick(model):
            logits = model(tokens[start : start + size].to(model.device), use_cache=False).logits
        top = torch.log_softmax(logits.float(), -1).topk(min(LIKELIEST, logits.shape[-1]))
        likely.append(top.indices.int().cpu())
        logs.append(top.values.half().cpu())
    progress("the model answers", len(tokens), len(tokens))
    return Answers(tokens, torch.cat(likely), torch.cat(logs))


def quick(model: Any) -> AbstractContextManager[Any]:
    """bfloat16 products, where the processor has them; teacher and student compute alike."""
    kind = model.device.type
    able = kind != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())
    return torch.autocast(kind, torch.bfloat16, enabled=able)
