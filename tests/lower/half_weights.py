"""transformers' models with weights rounded to fp16, as packages hold them."""

from typing import Any

import numpy as np
import torch
import transformers


class HalfWeights:
    """A checkpoint whose tensors are rounded to fp16."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.source, self.config, self.shape = (
            checkpoint.source, checkpoint.config, checkpoint.shape,
        )  # fmt: skip

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def names(self) -> list[str]:
        return self.checkpoint.names()

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).half()

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read_rows(name, start, stop).half()


def half_logits_of(model: transformers.PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """transformers' logits `(T, V)` in fp32. The model's weights stay rounded to fp16."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.half())
        return model(torch.tensor([tokens])).logits[0].numpy()


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The cosine of each pair of rows."""
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
