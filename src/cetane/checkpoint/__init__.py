"""A model's config, tokenizer and lazily read tensors, under canonical (Hugging Face) names."""

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.open import open_checkpoint
from cetane.checkpoint.tokenizer import Tokenizer

__all__ = ["Checkpoint", "Tokenizer", "open_checkpoint"]
