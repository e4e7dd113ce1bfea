"""Stored tensors as torch tensors, and small integers unpacked from words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.checkpoint import StoredTensor

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U32": ("uint32", 4),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors' dtypes: torch's name, and bytes per element."""


def to_torch(stored: StoredTensor) -> torch.Tensor:
    """The tensor in its stored dtype, in memory of its own."""
    import torch  # here, so that opening a checkpoint does not load it

    dtype = getattr(torch, DTYPES[stored.dtype][0])
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(stored.read(), dtype=dtype).reshape(stored.shape)


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
