"""The experts of a layer of a transformers model: the tokens that chose each, its products, and how
much its errors count.

transformers keeps the matrices of all experts of a layer in one module: `gate_up_proj` and
`down_proj`. If the experts have no gates, the first is `up_proj`. It calls the module with all
tokens, the experts that each chose, and their weights. Llama 4's gets a copy of the tokens for each
expert, weighed already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cetane.fitting.importance import PIECE, Collector, Importance, Matrix, mean_of

FIRST, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""The tensor that an expert reads first, with gates and without, and the other one."""
ENOUGH = 8
"""The least number of tokens by which an expert is rounded, in multiples of its inputs.

Measured with zaya-tiny in three bits, fitted on 2,300 tokens: 1.5 for each input of an expert. On
two texts the KL is 0.045 and 0.067 without further tokens, 0.045 and 0.063 with 2, 0.043 and 0.059
with 8. To read all tokens is no better."""
SAMPLED = 4096
"""Tokens on which the gradients inside experts are computed: they tell one number for a layer."""
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
        """Whether the input of an expert is weighed, not its output: in Llama 4."""
        if self.weighed_first:
            copies = given[0].float().unflatten(0, (self.count, -1))
            self.states = copies.sum(0)
            lengths = torch.linalg.vector_norm(self.states, dim=1).clamp(min=1e-30)
            self.shares = (torch.linalg.vector_norm(copies, dim=2) / lengths).T
        else:
            self.states = given[0].float()
            chosen, weights = (one.reshape(len(self.states), -1) for one in given[1:3])
            # ZAYA's tokens may choose one more, which computes nothing
            shares = torch.zeros(len(self.states), self.count + 1)
            self.shares = shares.scatter_add(1, chosen, weights.float())[:, : self.count]
        self.hidden = self.states.shape[1]
        self.width = module.down_proj[0].numel() // self.hidden
        """The inner channels of an expert."""
        self.gated = getattr(module, "has_gate", True)
        """Whether an expert's first product makes gates and ups, not ups alone."""

    @property
    def _transposed(self) -> bool:
        """Whether the module keeps its matrices as `(E, I, O)`."""
        return self.weighed_first or self.module.is_transposed

    def readers(self, first: int, stop: int) -> Tensor:
        """The numbers of the tokens that any of some experts reads, int64 `(n,)`."""
        return self.shares[:, first:stop].any(1).nonzero()[:, 0]

    def weighed(self, tokens: Tensor, expert: int) -> Tensor:
        """The states of some tokens, times their weights of an expert."""
        return self.states[tokens] * self.shares[tokens, expert, None]

    def first_product(self, expert: int, tokens: Tensor) -> Tensor:
        """What an expert first makes of some tokens, `(n, 2 I)`; `(n, I)` without gates."""
        name = FIRST[0 if self.gated else 1]
        matrix = getattr(self.module, name)[expert]
        states = self.weighed(tokens, expert) if self.weighed_first else self.states[tokens]
        made: Tensor = states @ (matrix if self._transposed else matrix.T)
        if not self.weighed_first and self.module.has_bias:
            made = made + getattr(self.module, f"{name}_bias")[expert]
        return made

    def inner(self, expert: int, tokens: Tensor, made: Tensor) -> Tensor:
        """What an expert multiplies last, of some tokens' `first_product`, weighed, `(n, I)`."""
        module = self.module
        if self.weighed_first:
            gate, up = made.chunk(2, -1)
            mixed: Tensor = module.act_fn(gate) * up
            return mixed
        mixed = module._apply_gate(made) if self.gated else module.act_fn(made)
        return mixed * self.shares[tokens, expert, None]

    def first_gradients(self, expert: int, tokens: Tensor, outputs: Tensor) -> Tensor:
        """The gradients of an expert's `first_product` of some tokens, from those of what all
        experts make together, `outputs (n, H)`."""
        down = self.module.down_proj[expert]
        with torch.enable_grad():
            made = self.first_product(expert, tokens).detach().requires_grad_(True)
            inner = self.inner(expert, tokens, made)
        by_inner = outputs @ (down.T if self._transposed else down)
        return torch.autograd.grad(inner, made, by_inner.to(inner.dtype))[0]


class ExpertProducts:
    """The products of what the experts of a layer read, by which they are rounded."""

    def __init__(self, routed: RoutedExperts, counts: Tensor | None = None) -> None:
        """`counts (N,)` are how much an error at each token counts; None if all count alike.

        An expert that few tokens chose reads others too: the shares of `routed` change.
        """
        routed.shares = with_others(routed.shares, ENOUGH * max(routed.width, routed.hidden))
        self.routed = routed
        self.roots = torch.ones(len(routed.states)) if counts is None else counts.sqrt()
        self._last: tuple[int, Matrix] | None = None

    def inputs(self, expert: int) -> Matrix:
        """The mean product of what an expert reads, fp32 `(H, H)`, over all tokens. The last one is
        kept: gates and ups read the same."""
        if self._last is None or self._last[0] != expert:
            made = self._mean(
                expert, expert + 1, self.routed.hidden,
                lambda tokens: self.routed.weighed(tokens, expert),
            )  # fmt: skip
            self._last = expert, made
        return self._last[1]

    def inner(self, first: int, stop: int) -> Matrix:
        """The mean product of what some experts multiply last, side by side, fp32
        `(experts * I, experts * I)`."""
        routed = self.routed

        def side_by_side(tokens: Tensor) -> Tensor:
            return torch.cat(
                [routed.inner(expert, tokens, routed.first_product(expert, tokens))
                 for expert in range(first, stop)], 1)  # fmt: skip

        return self._mean(first, stop, (stop - first) * routed.width, side_by_side)

    def _mean(
        self, first: int, stop: int, size: int, rows_of: Callable[[Tensor], Tensor]
    ) -> Matrix:
        """The mean product of the rows `(n, size)` of the tokens that some experts read. All other
        tokens have zeros."""
        pieces = (
            (rows_of(tokens).float() * self.roots[tokens, None]).numpy()
            for tokens in self.routed.readers(first, stop).split(PIECE)
        )
        return mean_of(pieces, size, len(self.routed.states))


class ExpertCollector(Collector):
    """Gathers the importance of a layer's experts from the gradients of what they make together.

    An error of an expert's last matrix changes this, so its importance is that of a linear layer. A
    token counts for the first matrices as it does for the last. How much these count on the whole
    is told by the gradients inside the experts, of some tokens.
    """

    def __init__(self, names: Mapping[str, str], module: nn.Module) -> None:
        """`names` are the checkpoint's, of the module's two tensors in order."""
        self.first, last = names.values()
        super().__init__(last, module)
        self.sampled: list[Tensor] = []
        """The squares of the weights with which experts read each token, together, `(n,)`."""
        self.inside = 0.0
        """The sum of the squares of all gradients of `first_product` of these tokens."""
        self.channels = 0

    def watch(self, _layer: nn.Module, given: Any, outputs: Tensor) -> None:
        if outputs.requires_grad:
            outputs.register_hook(partial(self.add_routed, [one.detach() for one in given]))

    def add_routed(self, given: Sequence[Tensor], gradient: Tensor) -> None:
        routed = RoutedExperts(self.layer, given)
        # Llama 4's copies of a token, which are summed, all have its gradient
        rows = gradient.reshape(-1, routed.hidden)[: len(routed.states)]
        self.add(rows)
        if sum(map(len, self.sampled)) >= SAMPLED:
            return
        self.sampled.append(routed.shares.square().sum(1))
        for expert in range(routed.count):
            tokens = routed.readers(expert, expert + 1)
            inside = routed.first_gradients(expert, tokens, rows[tokens])
            self.inside += float(inside.float().square().sum())
            self.channels = inside.shape[1]

    def made(self) -> dict[str, Importance]:
        if not self.squares:
            return {}
        last = self.importance()
        shares = torch.cat(self.sampled)
        counted = float((last.tokens[: len(shares)] * shares).sum())
        scale = self.inside / self.channels / max(counted, 1e-30)
        return {self.name: last, self.first: Importance(last.tokens.clone(), None, scale)}


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
