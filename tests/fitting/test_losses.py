"""Losses in pieces: the same sum and the same gradients as at once."""

import torch
from torch import Tensor

from cetane.fitting.losses import PIECE, in_pieces


def test_pieces_are_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    rows = 2 * PIECE + 3
    logits = torch.randn(rows, 7, generator=random, requires_grad=True)
    targets = torch.randint(0, 7, (rows,), generator=random)

    def loss(own: Tensor, part: slice) -> Tensor:
        return torch.nn.functional.cross_entropy(own, targets[part], reduction="sum")

    (3 * in_pieces(logits, loss)).backward()
    again = logits.detach().requires_grad_()
    whole = 3 * torch.nn.functional.cross_entropy(again, targets, reduction="sum")
    whole.backward()
    torch.testing.assert_close(logits.grad, again.grad)
    torch.testing.assert_close(3 * in_pieces(logits.detach(), loss), whole.detach())
