"""The experts of a layer of a transformers model: the tokens that chose each, and its products.

transformers keeps the matrices of all experts of a layer in one module, as `gate_up_proj` and
`down_proj`, or as `up_proj` and `down_proj` if they have no gates. It calls the module with all
tokens, the experts that each chose, and their weights. Llama 4's gets a copy of the tokens for each
expert, weighed already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cetane.compress.encoded import Half
from cetane.families import Weight
from cetane.fitting.importance import PIECE, Matrix, mean_of

FIRST, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""The tensor that an expert reads first, with gates and without, and the other one."""
ENOUGH = 8
"""The least number of tokens by which an expert is rounded, in multiples of its inputs.

Measured with zaya-tiny in three bits, fitted on 2,300 tokens: 1.5 for each input of an expert. On
two texts the KL is 0.045 and 0.067 without further tokens, 0.045 and 0.063 with 2, 0.043 and 0.059
with 8. To read all tokens is no better."""
FAINT = 0.3
"""The weight of a token that an expert reads though it did not choose it, in multiples of the mean
weight of those that did."""


def modules_of_experts(
    model: Any, names: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[nn.Module, Mapping[str, str]]]:
    """The modules of experts of a transformers model, with the checkpoint's names of their two
    tensors, in the order in which a module computes.

    `names` are those of each module's own tensors, by its path.
    """
    for path, own in names.items():
        first = next((name for name in FIRST if name in own), None)
        if first is not None and DOWN in own:
            yield model.get_submodule(path), {name: own[name] for name in (first, DOWN)}


class RoutedExperts:
    """A module of E experts, and N tokens of which each chose some."""

    def __init__(self, module: Any, given: Sequence[Tensor]) -> None:
        """`given` is what transformers calls the module with."""
        self.module, self.count = module, len(module.down_proj)
        self.weighed_first = len(given) == 1
        """Whether the input of an expert is weighed, not its output."""
        if self.weighed_first:
            copies = given[0].float().unflatten(0, (self.count, -1))
            self.states = copies.sum(0)
            lengths = torch.linalg.vector_norm(self.states, dim=1).clamp(min=1e-30)
            shares = (torch.linalg.vector_norm(copies, dim=2) / lengths).T
        else:
            self.states = given[0].float()
            chosen, weights = (one.reshape(len(self.states), -1) for one in given[1:3])
            # ZAYA's tokens may choose one more, which computes nothing
            shares = torch.zeros(len(self.states), self.count + 1)
            shares = shares.scatter_add(1, chosen, weights.float())[:, : self.count]
        hidden = self.states.shape[1]
        self.width = module.down_proj[0].numel() // hidden
        """The inner channels of an expert."""
        self._last: tuple[int, Matrix] | None = None
        self.shares = with_others(shares, ENOUGH * max(self.width, hidden))
        """The weight of each expert in each token, `(N, E)`; 0 where it does not read it."""

    def input_products(self, expert: int) -> Matrix:
        """The mean product of what an expert reads, fp32 `(H, H)`, over all tokens. The last one is
        kept: gates and ups read the same."""
        if self._last is None or self._last[0] != expert:
            pieces = (self._weighed(part, expert) for part in self._read(expert, expert + 1))
            self._last = expert, self._mean(pieces, self.states.shape[1])
        return self._last[1]

    def inner_products(self, first: int, stop: int) -> Matrix:
        """The mean product of what some experts multiply last, side by side, fp32
        `(experts * I, experts * I)`."""
        experts = range(first, stop)
        pieces = (torch.cat([self.inner(expert, part) for expert in experts], 1)
                  for part in self._read(first, stop))  # fmt: skip
        return self._mean(pieces, len(experts) * self.width)

    def inner(self, expert: int, tokens: Tensor) -> Tensor:
        """What an expert makes of some tokens before its last product, weighed, `(n, I)`."""
        module, shares = self.module, self.shares[tokens, expert, None]
        if not getattr(module, "has_gate", True):
            plain: Tensor = module.act_fn(self.states[tokens] @ module.up_proj[expert].T)
            return plain * shares
        matrix = module.gate_up_proj[expert]
        if self.weighed_first:  # Llama 4's
            gate, up = (self._weighed(tokens, expert) @ matrix).chunk(2, -1)
            made: Tensor = module.act_fn(gate) * up
            return made
        both = self.states[tokens] @ (matrix if module.is_transposed else matrix.T)
        if module.has_bias:
            both = both + module.gate_up_proj_bias[expert]
        made = module._apply_gate(both)
        return made * shares

    def _weighed(self, tokens: Tensor, expert: int) -> Tensor:
        """The states of some tokens, times their weights of an expert."""
        return self.states[tokens] * self.shares[tokens, expert, None]

    def _read(self, first: int, stop: int) -> tuple[Tensor, ...]:
        """The numbers of the tokens that any of some experts reads, in pieces."""
        return self.shares[:, first:stop].any(1).nonzero()[:, 0].split(PIECE)

    def _mean(self, pieces: Iterable[Tensor], size: int) -> Matrix:
        """The mean product of rows `(n, size)` with themselves. All other tokens have zeros."""
        return mean_of((piece.float().numpy() for piece in pieces), size, len(self.states))


def with_others(shares: Tensor, least: int) -> Tensor:
    """The weights `(N, E)`, of which every expert has `least` that are not zero, if there are as
    many tokens. An expert that fewer tokens chose also reads evenly spaced others, at `FAINT`."""
    read = shares > 0
    made = shares.clone()
    for expert in (read.sum(0) < least).nonzero()[:, 0].tolist():
        own = shares[read[:, expert], expert]
        free = (~read[:, expert]).nonzero()[:, 0]
        missing = min(least - len(own), len(free))
        others = free[torch.linspace(0, len(free) - 1, missing).round().long()]
        made[others, expert] = FAINT * (float(own.mean()) if len(own) else 1.0)
    return made


def views_of(weight: Weight, stored: Tensor) -> list[Tensor]:
    """The parts `(O, I)` of the stacked tensor that make a weight, one for each expert: views."""
    assert weight.rows is not None
    one_by_one = (stored[expert : expert + 1] for expert in range(*weight.rows))
    return [one[0] if weight.pick is None else weight.pick(one) for one in one_by_one]


def put(weight: Weight, stored: Tensor, values: Matrix | Half) -> None:
    """Write the values `(O, I)` of a weight into the stacked tensor. Experts lie side by side in
    what they multiply last, else one below the other."""
    views, axis = views_of(weight, stored), int(weight.side_by_side)
    parts = torch.from_numpy(values).tensor_split(len(views), axis)
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)


def own_copy(tensor: Tensor) -> Tensor:
    """A parameter's values as memory that may be changed: they may be pages of a file."""
    tensor.data = tensor.data.clone()
    return tensor.data
