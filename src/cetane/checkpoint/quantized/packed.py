"""Small integers, unpacked from the words or bytes that hold several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def from_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `(R, C * 32 / bits)`, unpacked from words `(R, C)`, each from its lowest bits up."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    wide = words.to(torch.int64)[:, :, None] >> shifts
    return (wide & ((1 << bits) - 1)).to(torch.int32).reshape(len(words), -1)


def from_fours(data: torch.Tensor) -> torch.Tensor:
    """int64 indices, unpacked from bytes that hold two each, the high half first."""
    import torch

    flat = data.reshape(-1).to(torch.int64)
    return torch.stack([flat >> 4, flat & 15], 1).reshape(-1)
