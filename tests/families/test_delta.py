"""The gated delta rule for a call of tokens equals its definition, token by token."""

import numpy as np
import pytest
import torch

from cetane.engine.memory import folded
from cetane.families.axes import Axes
from cetane.families.delta import delta_rule
from cetane.families.matrices import MatrixHeads

HEADS = MatrixHeads(key_heads=2, groups=3, keys=5, values=4)


def by_definition(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    decays: torch.Tensor, rates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Answers `(count, values, T)`, and the matrix after each token, in double precision."""
    states = matrix.double().reshape(2, 5, 3, 4).permute(0, 2, 1, 3).reshape(6, 5, 4)
    answers, after = [], []
    for t in range(q.shape[-1]):
        asked = [x[0, :, :, t].double().repeat_interleave(3, 0) for x in (k, q)]
        states = states * decays[0, :, 0, t].double().exp()[:, None, None]
        told = (states * asked[0][:, :, None]).sum(1)
        change = (v[0, :, :, t].double() - told) * rates[0, :, 0, t].double()[:, None]
        states = states + asked[0][:, :, None] * change[:, None]
        answers.append((states * asked[1][:, :, None]).sum(1))
        after.append(states.reshape(2, 3, 5, 4).permute(0, 2, 1, 3).reshape(1, 2, 5, 12))
    return torch.stack(answers, -1), torch.stack(after)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("alike", [False, True])
def test_a_call_is_its_tokens(tokens: int, alike: bool) -> None:
    """Keys that are all alike make the corrections depend on each other most; decays that are large
    and small in turn would be lost in running sums."""
    draw = torch.Generator().manual_seed(tokens)
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(1, 2, 5, tokens, generator=draw), dim=2) for _ in range(2))
    if alike:
        k = k[..., :1].expand_as(k).contiguous()
    v = torch.randn(1, 6, 4, tokens, generator=draw)
    decays = -torch.rand(1, 6, 1, tokens, generator=draw) * 0.1
    decays[..., 2::3] *= 500
    rates = torch.full((1, 6, 1, tokens), 1.0) - 0.01 * torch.rand(1, 6, 1, tokens, generator=draw)
    matrix = torch.randn(1, 2, 5, 12, generator=draw)
    expected, after = by_definition(matrix, q, k, v, decays, rates)
    answers, columns = delta_rule(HEADS, Axes(), q, k, v, decays, rates)(matrix)
    torch.testing.assert_close(answers[0].double(), expected, rtol=1e-4, atol=1e-5)
    new = torch.cat(columns, 1).reshape(1, -1, tokens).numpy()
    for count in range(1, tokens + 1):
        kept = folded(matrix.numpy(), new[..., :count], 3)
        np.testing.assert_allclose(kept, after[count - 1].numpy(), rtol=1e-4, atol=1e-5)
