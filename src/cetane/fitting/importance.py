"""How much errors of a layer's outputs change what the model answers.

The model wrote the text itself, so its next tokens are samples of its own answers, and products of
the gradients of their losses are the Fisher information: the second derivative of the KL from what
the model answers. Of each layer two factors are kept, as K-FAC does (arXiv 1503.05671): products of
inputs with tokens that count differently (GuidedQuant, arXiv 2505.07004), and products of outputs
(YAQA, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cetane.files import Progress
from cetane.fitting.teacher import quick

EVEN = 0.5
"""Part of a token's importance that all tokens share. Without it few tokens would decide, and other
texts be worse off: held out, the errors of half the matrices grew by up to 15 %."""
LARGEST = 4096
"""Outputs of a layer whose products are kept, 64 MB; of more, every output counts alike."""
ROWS = 1024
"""Tokens of a pass."""


@dataclass(frozen=True)
class Importance:
    """Of the errors of one layer."""

    tokens: Tensor
    """What the errors at every token count, `(N,)`, 1 on average."""
    outputs: Tensor | None
    """How errors of the outputs count together, fp32 `(O, O)`, its trace O; None for too many."""

    def products(self, inputs: Tensor) -> Tensor:
        """The mean product of inputs `(N, I)` at these tokens."""
        counts = self.tokens if len(self.tokens) == len(inputs) else torch.ones(len(inputs))
        return (inputs * counts[:, None]).T @ inputs / len(inputs)


class Collector:
    """Gathers the importance of one layer from its outputs' gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        outputs = len(layer.weight)
        self.sum = torch.zeros(outputs, outputs) if outputs <= LARGEST else None
        self.squares: list[Tensor] = []

    def watch(self, _layer: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        """A forward hook. What no token reaches has no gradient: ZAYA projects zeros too, for the
        token before the first."""
        if outputs.requires_grad:
            outputs.register_hook(self.add)

    def add(self, gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self.squares.append(rows.float().square().sum(1).cpu())
        if self.sum is not None:
            self.sum += (rows.T @ rows).float().cpu()

    def made(self) -> Importance:
        squares = torch.cat(self.squares)
        tokens = EVEN + (1 - EVEN) * squares / squares.mean().clamp(min=1e-30)
        if self.sum is None:
            return Importance(tokens, None)
        return Importance(tokens, self.sum / self.sum.diagonal().mean().clamp(min=1e-30))


def importance(
    model: Any, layers: Mapping[str, nn.Linear], text: Tensor, progress: Progress
) -> dict[str, Importance]:
    """Of a transformers model's layers, by name, for text that it wrote, int64 `(B, T)`."""
    collectors = {name: Collector(layer) for name, layer in layers.items()}
    parts = text.split(max(1, ROWS // text.shape[1]))
    with ExitStack() as stack, torch.enable_grad():
        embedding = model.get_input_embeddings().register_forward_hook(with_gradient)
        stack.callback(embedding.remove)
        for name, layer in layers.items():
            hook = layer.register_forward_hook(collectors[name].watch)
            stack.callback(hook.remove)
        for number, part in enumerate(parts):
            progress("what errors change", number, len(parts))
            loss_of(model, part.to(model.device)).backward()
    progress("what errors change", len(parts), len(parts))
    return {name: one.made() for name, one in collectors.items() if one.squares}


def with_gradient(_module: nn.Module, _inputs: Any, hidden: Tensor) -> Tensor:
    """A forward hook: gradients of all that is computed from here on, though no weight learns."""
    return hidden.requires_grad_(True)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The sum of the losses of all next tokens."""
    with quick(model):
        logits = model(tokens, use_cache=False).logits[:, :-1]
    rows = logits.reshape(-1, logits.shape[-1]).float()
    return nn.functional.cross_entropy(rows, tokens[:, 1:].flatten(), reduction="sum")
