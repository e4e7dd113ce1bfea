"""Checkpoints in one GGUF file."""

from cetane.checkpoint.gguf.checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
