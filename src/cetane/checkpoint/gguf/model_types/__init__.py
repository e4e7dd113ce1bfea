"""What single model types add to the config of a GGUF file, or have otherwise."""

from cetane.checkpoint.gguf.model_types import dense, gemma, mixtures, recurrent, sigmoids
from cetane.checkpoint.gguf.model_types.facts import OWN, Facts

__all__ = ["OWN", "Facts", "dense", "gemma", "mixtures", "recurrent", "sigmoids"]
