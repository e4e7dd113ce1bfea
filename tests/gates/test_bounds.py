"""A torch module shows its bounds while it runs."""

import torch
from torch import Tensor, nn

from cetane.gates.bounds import Bounds
from cetane.gates.reference import Reference

from .mutations.families import build, tokenizer_of
from .mutations.ports import TinyCheckpoint


def softcapped(x: Tensor) -> Tensor:
    """A function outside of the module, as transformers' attention."""
    capped = torch.tanh(x / 30)
    return capped * 30.0


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = softcapped(x).clamp(min=None, max=7)
        x.clamp_(-5, 5)
        x = 0.5 * x * (1 + torch.tanh(x))  # no softcap
        torch.arange(3).clamp(max=2)  # no activation
        return torch.clip(x, -4.5, 4.5)


def test_bounds_are_noted() -> None:
    model = nn.Sequential(nn.Identity(), Bounded())
    bounds = Bounds(model)
    with bounds:
        model(torch.ones(2))
    model(torch.ones(2).clamp(max=0.5))  # behind the context
    noted = [*bounds.noted.values()]
    assert [held.bounds for held in noted] == [(30,), (7,), (-5, 5), (-4.5, 4.5)]
    assert {path for path, _ in bounds.noted} == {"1"}


def test_what_cetane_does_beside_a_router_is_no_bound() -> None:
    checkpoint = TinyCheckpoint(build("qwen3_moe"), tokenizer_of())
    reference = Reference(checkpoint)
    assert reference.bounds == {}
