"""Random numbers. With a seed, every call gives the same numbers; -1 means no seed."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import op


@op("random_uniform")
def random_uniform(shape: list[int], low: float = 0.0, high: float = 1.0, seed: int = -1) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=_generator(seed))


@op("random_normal")
def random_normal(
    shape: list[int], mean: float = 0.0, stddev: float = 1.0, seed: int = -1
) -> Tensor:
    return mean + stddev * torch.randn(shape, generator=_generator(seed))


@op("random_bernoulli")
def random_bernoulli(shape: list[int], prob: float = 0.5, seed: int = -1) -> Tensor:
    return (torch.rand(shape, generator=_generator(seed)) < prob).float()


@op("random_categorical")
def random_categorical(x: Tensor, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    probabilities = torch.softmax(x, -1) if mode == "logits" else x
    rows = probabilities.reshape(-1, x.shape[-1])
    drawn = torch.multinomial(rows, size, replacement=True, generator=_generator(seed))
    return drawn.reshape(*x.shape[:-1], size)


def _generator(seed: int) -> torch.Generator | None:
    return None if seed == -1 else torch.Generator().manual_seed(seed)
