"""What heads are taught in tests."""

from typing import Any

import torch

from cetane.speculate.draft_heads.modules import DraftHeadConfig, TorchDraftHead, make_draft_head
from cetane.speculate.draft_heads.windows import Windows

KINDS = ["medusa", "eagle3"]
STEPS = 3


def config(kind: str, rows: int = 50, hidden: int = 16) -> DraftHeadConfig:
    return DraftHeadConfig(
        kind=kind, hidden=hidden, rows=rows, steps=STEPS, eps=1e-5, bundle="ab" * 32
    )  # fmt: skip


def counting(windows: int = 40, length: int = 24, vocab: int = 8, hidden: int = 64) -> Any:
    """A target that counts: the token after t is t + 1. Its features hold the token by which it
    chooses, so that a head can know all that follows."""
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(0, vocab, (windows, 1), generator=random)
    ids = (starts + torch.arange(length)) % vocab
    embedding = torch.randn(vocab, hidden, generator=random)
    features = embedding[(ids + 1) % vocab][:, :, None].repeat(1, 1, 3, 1) * 3
    return Windows(features.half(), ids, (ids + 1) % vocab), embedding


def untrained(kind: str, embedding: torch.Tensor) -> TorchDraftHead:
    head = make_draft_head(config(kind, *embedding.shape))  # rows, hidden
    head.vocabulary, head.output = torch.arange(len(embedding)), embedding * 2
    return head
