"""Checkpoints: a model's config, tokenizer and lazily read tensors, under Hugging Face's names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cetane.checkpoint.checkpoint import Checkpoint
    from cetane.checkpoint.open import open_checkpoint
    from cetane.checkpoint.rotated import Fold, RotatedCheckpoint, Rotation
    from cetane.checkpoint.streamed import HeadOrder, SeenByHeads, StreamedCheckpoint, streamed_part
    from cetane.checkpoint.tokenizer import Tokenizer

__all__ = [
    "Checkpoint", "Fold", "HeadOrder", "RotatedCheckpoint", "Rotation", "SeenByHeads",
    "StreamedCheckpoint", "Tokenizer", "open_checkpoint", "streamed_part",
]  # fmt: skip

_MODULES = {
    "Checkpoint": "checkpoint", "Tokenizer": "tokenizer", "open_checkpoint": "open",
    "Fold": "rotated", "RotatedCheckpoint": "rotated", "Rotation": "rotated",
    "HeadOrder": "streamed", "SeenByHeads": "streamed", "StreamedCheckpoint": "streamed",
    "streamed_part": "streamed",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use: a bundle's manifest is read without a tokenizer."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
