"""Mamba-2 for a call of tokens equals its definition, token by token."""

import numpy as np
import pytest
import torch

from cetane.engine.memory import folded
from cetane.families.axes import Axes
from cetane.families.mamba2 import GroupNorm, state_space
from cetane.families.matrices import MatrixHeads

HEADS = MatrixHeads(key_heads=2, groups=3, keys=5, values=4)


def by_definition(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers `(count, values, T)`, and the matrix after each token, in double precision."""
    states = matrix.double().reshape(2, 5, 3, 4).permute(0, 2, 1, 3).reshape(6, 5, 4)
    answers, after = [], []
    for t in range(q.shape[-1]):
        asked, key = (x[0, :, :, t].double().repeat_interleave(3, 0) for x in (q, k))
        states = states * decays[0, :, 0, t].double().exp()[:, None, None]
        states = states + key[:, :, None] * v[0, :, :, t].double()[:, None]
        answers.append((states * asked[:, :, None]).sum(1))
        after.append(states.reshape(2, 3, 5, 4).permute(0, 2, 1, 3).reshape(1, 2, 5, 12))
    return torch.stack(answers, -1), torch.stack(after)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 13])
def test_a_call_is_its_tokens(tokens: int) -> None:
    """Decays that are large and small in turn would be lost in running sums, and ratios of their
    exponentials would overflow."""
    draw = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, 2, 5, tokens, generator=draw) for _ in range(2))
    v = torch.randn(1, 6, 4, tokens, generator=draw)
    decays = -torch.rand(1, 6, 1, tokens, generator=draw) * 0.1
    decays[..., 2::3] *= 5000
    matrix = torch.randn(1, 2, 5, 12, generator=draw)
    expected, after = by_definition(matrix, q, k, v, decays)
    answers, columns = state_space(HEADS, Axes(), q, k, v, decays)(matrix)
    torch.testing.assert_close(answers[0].double(), expected, rtol=1e-4, atol=1e-5)
    new = torch.cat(columns, 1).reshape(1, -1, tokens).numpy()
    for count in range(1, tokens + 1):
        kept = folded(matrix.numpy(), new[..., :count], 3)
        np.testing.assert_allclose(kept, after[count - 1].numpy(), rtol=1e-4, atol=1e-5)


def test_groups_are_normed_apart() -> None:
    x = torch.randn(1, 6, 1, 2, generator=torch.Generator().manual_seed(0))
    norm = GroupNorm(6, 2, eps=1e-3)
    gains = torch.arange(1.0, 7.0)[:, None, None]
    norm.weight.data.copy_(gains)
    for part in (slice(3), slice(3, 6)):
        own = x[:, part]
        expected = own / (own.square().mean(1, keepdim=True) + 1e-3).sqrt() * gains[part]
        torch.testing.assert_close(norm(x)[:, part], expected)
